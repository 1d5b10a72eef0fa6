// A line chart of the last minutes on a canvas, in the theme's colours.

import { h } from "./dom.js";

const MARGIN = { left: 36, right: 8, top: 10, bottom: 20 }; // px

export class Chart {
  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "Tokens per second over the last three minutes" });
    this.tip = h(".tip", { hidden: true });
    this.node = h(".chart", null, this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => { this.at = null; this.draw(this.values ?? []); });
    new ResizeObserver(() => this.values && this.draw(this.values)).observe(this.canvas);
  }

  point(x) {
    const width = this.canvas.clientWidth - MARGIN.left - MARGIN.right, last = this.values.length - 1;
    this.at = Math.max(0, Math.min(last, Math.round(((x - MARGIN.left) / width) * last)));
    this.draw(this.values);
  }

  draw(values) {
    this.values = values;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !values.length) return;
    const scale = devicePixelRatio || 1, ink = this.canvas.getContext("2d");
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    ink.scale(scale, scale);
    const style = getComputedStyle(this.canvas), colour = (name) => style.getPropertyValue(name).trim();
    const top = ceiling(Math.max(...values)), last = values.length - 1;
    const x = (i) => MARGIN.left + ((width - MARGIN.left - MARGIN.right) * i) / last;
    const y = (v) => MARGIN.top + (height - MARGIN.top - MARGIN.bottom) * (1 - v / top);
    ink.font = `11px ${style.fontFamily}`;
    ink.fillStyle = colour("--muted");
    ink.strokeStyle = colour("--line");
    ink.textBaseline = "middle";
    ink.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      line(ink, [[MARGIN.left, y(top * part)], [width - MARGIN.right, y(top * part)]]);
      ink.fillText(String(top * part), MARGIN.left - 8, y(top * part));
    }
    ink.textBaseline = "bottom";
    for (const ago of [180, 120, 60, 0].filter((s) => s <= values.length)) {
      ink.textAlign = ago === 0 ? "right" : ago === values.length ? "left" : "center";
      ink.fillText(ago ? `${ago / 60} min ago` : "now", x(Math.max(0, last - ago)), height - 2);
    }
    const points = values.map((v, i) => [x(i), y(v)]);
    const fade = ink.createLinearGradient(0, MARGIN.top, 0, height - MARGIN.bottom);
    fade.addColorStop(0, colour("--fade"));
    fade.addColorStop(1, colour("--fade-end"));
    ink.fillStyle = fade;
    path(ink, [[x(0), y(0)], ...points, [x(last), y(0)]]);
    ink.fill();
    ink.strokeStyle = colour("--accent");
    ink.lineWidth = 1.75;
    ink.lineJoin = "round";
    line(ink, points);
    this.mark(ink, points, colour("--accent"));
  }

  mark(ink, points, colour) {
    this.tip.hidden = this.at === null || this.at === undefined;
    if (this.tip.hidden) return;
    const [px, py] = points[this.at];
    ink.fillStyle = colour;
    ink.beginPath();
    ink.arc(px, py, 3.5, 0, 7);
    ink.fill();
    this.tip.textContent = `${this.values[this.at]} tok/s, ${this.values.length - this.at} s ago`;
    this.tip.style.left = `${Math.max(70, Math.min(px, this.canvas.clientWidth - 70))}px`;
  }
}

/** The round number at or above the maximum, for the axis. */
function ceiling(max) {
  if (max <= 10) return 10;
  const ten = 10 ** Math.floor(Math.log10(max));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((m) => m * ten).find((step) => step >= max);
}

function path(ink, points) {
  ink.beginPath();
  points.forEach(([px, py], i) => (i ? ink.lineTo(px, py) : ink.moveTo(px, py)));
}

function line(ink, points) {
  path(ink, points);
  ink.stroke();
}
