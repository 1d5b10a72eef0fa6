// A line chart of the last minutes on a canvas, in the theme's colours.

import { h } from "./dom.js";
import { number, t } from "./i18n.js";

const MARGIN = { left: 44, right: 8, top: 10, bottom: 20 }; // px
const STEP = 0.1; // below which a value is shown with a decimal

export class Chart {
  /** `top`: the axis ends there, or by the largest value; `unit` of a value in its tip. */
  constructor(name, { unit = "", top = 0 } = {}) {
    Object.assign(this, { name, unit, top });
    this.canvas = h("canvas", { role: "img", "aria-label": name });
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

  /** Values of each second, oldest first; null: there is none. */
  draw(values) {
    this.values = values;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !values.length) return;
    const scale = devicePixelRatio || 1, ink = this.canvas.getContext("2d");
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    ink.scale(scale, scale);
    const style = getComputedStyle(this.canvas), colour = (name) => style.getPropertyValue(name).trim();
    const top = this.top || ceiling(Math.max(...values)), last = values.length - 1;
    const x = (i) => MARGIN.left + ((width - MARGIN.left - MARGIN.right) * i) / last;
    const y = (v) => MARGIN.top + (height - MARGIN.top - MARGIN.bottom) * (1 - v / top);
    ink.font = `11px ${style.fontFamily}`;
    ink.fillStyle = colour("--muted");
    ink.strokeStyle = colour("--line");
    ink.textBaseline = "middle";
    ink.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      line(ink, [[MARGIN.left, y(top * part)], [width - MARGIN.right, y(top * part)]]);
      ink.fillText(number(top * part, (top * part) % 1 ? 1 : 0) + (this.unit === "%" ? "%" : ""), MARGIN.left - 8, y(top * part));
    }
    ink.textBaseline = "bottom";
    for (const ago of [180, 120, 60, 0].filter((s) => s <= values.length && (width > 300 || s % 180 === 0))) {
      ink.textAlign = ago === 0 ? "right" : ago === values.length ? "left" : "center";
      ink.fillText(ago ? t("{n} min ago", { n: ago / 60 }) : t("now"), x(Math.max(0, last - ago)), height - 2);
    }
    const fade = ink.createLinearGradient(0, MARGIN.top, 0, height - MARGIN.bottom);
    fade.addColorStop(0, colour("--fade"));
    fade.addColorStop(1, colour("--fade-end"));
    ink.lineWidth = 1.75;
    ink.lineJoin = "round";
    for (const points of runs(values.map((v, i) => (v === null ? null : [x(i), y(Math.min(v, top))])))) {
      ink.fillStyle = fade;
      path(ink, [[points[0][0], y(0)], ...points, [points.at(-1)[0], y(0)]]);
      ink.fill();
      ink.strokeStyle = colour("--accent");
      line(ink, points);
    }
    const now = values.at(-1);
    this.canvas.setAttribute("aria-label", now === null ? this.name : `${this.name}: ${this.text(now)}`);
    this.mark(ink, x, y, colour("--accent"));
  }

  text(value) { return `${number(value, value % 1 > STEP ? 1 : 0)}${this.unit}`; }

  mark(ink, x, y, colour) {
    const value = this.values[this.at];
    this.tip.hidden = value === undefined || value === null;
    if (this.tip.hidden) return;
    ink.fillStyle = colour;
    ink.beginPath();
    ink.arc(x(this.at), y(value), 3.5, 0, 7);
    ink.fill();
    this.tip.textContent = t("{value}, {n} s ago", { value: this.text(value), n: this.values.length - this.at });
    this.tip.style.left = `${Math.max(70, Math.min(x(this.at), this.canvas.clientWidth - 70))}px`;
  }
}

/** The runs of points without gaps. */
function runs(points) {
  const found = [[]];
  for (const point of points) point ? found.at(-1).push(point) : found.push([]);
  return found.filter((run) => run.length);
}

/** The round number at or above the maximum, for the axis. */
function ceiling(max) {
  if (max <= 4) return 4;
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
