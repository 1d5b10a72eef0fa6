// Scales, axes, marks and labels: what every picture is made of.

const SVG = "http://www.w3.org/2000/svg";
const NARROW = 560; // pixels: below that there is little room
const color = (index) => `var(--c${Math.min(index, 9)})`;
const pen = document.createElement("canvas").getContext("2d");

function make(parent, tag, attributes = {}, text) {
  const drawn = parent instanceof SVGElement || tag === "svg";
  const made = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  const { tip, ...rest } = attributes;
  for (const [name, value] of Object.entries(rest)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  if (tip) {
    made.setAttribute("data-tip", tip);
    made.setAttribute("aria-label", tip);
  }
  parent.append(made);
  return made;
}

function canvas(box, height, title) {
  box.replaceChildren();
  const width = Math.max(260, box.clientWidth);
  return make(box, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
}

const widthOf = (text, size = 12) => {
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
};

// ---- numbers as text

function digits(value, least = 3) {
  const size = Math.abs(value);
  const places = size === 0 ? 0 : Math.max(0, least - 1 - Math.floor(Math.log10(size) + 1e-9));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(places, 6) });
}

function scaled(value, units) {
  const [unit, size] = units.find(([, least]) => value >= least * 0.9995) ?? units[units.length - 1];
  return `${digits(value / size)} ${unit}`;
}
const RATES = [["POP/s", 1e15], ["TOP/s", 1e12], ["GOP/s", 1e9], ["MOP/s", 1e6], ["kOP/s", 1e3]];
const operations = (value) => scaled(value, RATES);
const bandwidth = (value) => scaled(value, [["TB/s", 1e12], ["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]]);
const bytes = (value) => scaled(value, [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]);
const duration = (value) => scaled(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]);
const percent = (value) => `${digits(100 * value, 2)}%`;

// ---- scales

function scale(from, to, low, high, log = false) {
  const [a, b] = log ? [Math.log(from), Math.log(to)] : [from, to];
  return (value) => low + (((log ? Math.log(value) : value) - a) / (b - a || 1)) * (high - low);
}

function steps(from, to, most) {
  const rough = (to - from) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough - 1e-12);
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to * (1 + 1e-9) + 1e-12; i++) found.push(i * step);
  return found;
}

// Decades; with few of them also 2 and 5; within one, even steps.
function logTicks(from, to, most) {
  const decades = Math.log10(to / from);
  if (decades < 0.9) return steps(from, to, most).filter((value) => value > 0);
  const within = decades * 3 <= most ? [1, 2, 5] : [1];
  const every = within.length === 1 ? Math.max(1, Math.ceil(decades / most)) : 1;
  const found = [];
  for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(to)); power++)
    if (power % every === 0)
      found.push(...within.map((n) => n * 10 ** power));
  return found.filter((value) => value >= from * 0.999 && value <= to * 1.001);
}

// ---- axes

function yAxis(svg, ticks, at, left, right, format, title) {
  for (const value of ticks) {
    make(svg, "line", { x1: left, x2: right, y1: at(value), y2: at(value), class: "grid" });
    make(svg, "text", { x: left - 8, y: at(value) + 4, "text-anchor": "end" }, format(value));
  }
  make(svg, "text", { x: 0, y: 12, class: "strong" }, title);
}

function xAxis(svg, ticks, at, top, bottom, format, title, right) {
  let end = -Infinity;
  for (const value of ticks) {
    const x = at(value), half = widthOf(format(value)) / 2;
    make(svg, "line", { x1: x, x2: x, y1: top, y2: bottom, class: "grid" });
    if (x - half < end + 10) continue;
    make(svg, "text", { x, y: bottom + 18, "text-anchor": "middle" }, format(value));
    end = x + half;
  }
  make(svg, "text", { x: right, y: bottom + 38, "text-anchor": "end", class: "strong" }, title);
}

const BESIDE = ["right", "left", "above", "below"], ABOVE = ["above", "below", "right", "left"];

// Texts that keep out of each other's way, and out of the way of what is drawn; the first come first.
class Labels {
  constructor(svg, left, right, top, bottom) {
    Object.assign(this, { svg, left, right, top, bottom, taken: [] });
  }
  avoid(x, y, radius) {
    this.taken.push([x - radius, y - radius, x + radius, y + radius]);
  }
  put(text, x, y, gap, order = BESIDE, fill = "var(--text)") {
    const width = widthOf(text, 11.5);
    const places = {
      right: [x + gap, y + 4], left: [x - gap - width, y + 4],
      above: [x - width / 2, y - gap - 2], below: [x - width / 2, y + gap + 10],
    };
    for (const [left, middle] of order.map((name) => places[name])) {
      const box = [left - 2, middle - 10, left + width + 2, middle + 3];
      if (box[0] < this.left || box[2] > this.right || box[1] < this.top || box[3] > this.bottom) continue;
      if (this.taken.some((b) => b[0] < box[2] && b[2] > box[0] && b[1] < box[3] && b[3] > box[1])) continue;
      this.taken.push(box);
      make(this.svg, "text", { x: left, y: middle, class: "label", fill }, text);
      return true;
    }
    return false;
  }
}

// ---- the note that follows the pointer

function follow(tip) {
  const show = (event) => {
    const over = event.target.closest?.("[data-tip]");
    tip.hidden = !over;
    if (!over) return;
    tip.textContent = over.getAttribute("data-tip");
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, event.clientX + 14))}px`;
    tip.style.top = `${event.clientY + height + 22 > innerHeight ? event.clientY - height - 12 : event.clientY + 16}px`;
  };
  addEventListener("pointermove", show);
  addEventListener("pointerdown", show);
}
