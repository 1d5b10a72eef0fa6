// The roofline: operations per second over operations per byte, both in decades.

const COUNTS = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];

// `dots` are kernels, `whole` whole runs: each with ops, bytes, seconds, short (its label) and tip.
function roofline(box, { limits, dots, whole }) {
  const height = box.clientWidth < NARROW ? 380 : 480, svg = canvas(box, height, "Roofline");
  const width = svg.viewBox.baseVal.width, left = 62, right = width - 12, top = 26, bottom = height - 46;
  const area = { ...extent(limits, [...dots, ...whole].filter((dot) => dot.ops > 0)), left, right, top };
  const { low, high, least, most } = area;
  const x = (area.x = scale(low, high, left, right, true)), y = (area.y = scale(least, most, bottom, top, true));
  yAxis(svg, logTicks(least, most, 8), y, left, right, (value) => scaled(value, COUNTS), "operations per second");
  xAxis(svg, logTicks(low, high, width / 90), x, top, bottom, (value) => digits(value, 2), "operations per byte", right);

  const inside = (value) => y(Math.min(most, Math.max(least, value)));
  // What moves bytes only is at the left edge, as far under the line as its share of the bandwidth.
  const place = ({ ops, bytes, seconds }) =>
    ops > 0 ? [x(ops / bytes), inside(ops / seconds)] : [left, inside((bytes / seconds) * low)];
  const labels = new Labels(svg, left, right, top, bottom);
  limitLines(svg, labels, limits, area, [...dots, ...whole].map(place));

  const largest = width < NARROW ? 7 : 10;
  const placed = dots.map((dot) => ({ ...dot, at: place(dot), radius: 3 + largest * Math.sqrt(dot.share) }));
  for (const { at: [cx, cy], radius: r, color: index, tip } of [...placed].sort((a, b) => b.radius - a.radius)) {
    make(svg, "circle", { cx, cy, r, class: "dot kernel", fill: color(index), tip });
    labels.avoid(cx, cy, r * 0.8);
  }
  for (const dot of whole) {
    const [cx, cy] = place(dot);
    make(svg, "path", { d: `M${cx - 6} ${cy}l6 -6l6 6l-6 6Z`, class: "whole", tip: dot.tip });
    labels.avoid(cx, cy, 6);
  }
  for (const dot of whole) labels.put(dot.short, ...place(dot), 9);
  const named = new Set();
  for (const dot of placed.sort((a, b) => b.share - a.share))
    if (!named.has(dot.short) && labels.put(dot.short, ...dot.at, dot.radius + 3)) named.add(dot.short);
}

// From where to where the axes go.
function extent(limits, dots) {
  const { bytes_per_s: read, ops_per_s: peak } = limits;
  const intensities = dots.map((dot) => dot.ops / dot.bytes), rates = dots.map((dot) => dot.ops / dot.seconds);
  const ridge = peak ? peak / read : null;
  const low = Math.min(...intensities) / 2.5, high = Math.max(...intensities, ridge ?? 0) * 3;
  const least = Math.min(read * low, ...rates) / 2, most = 2.5 * (peak ?? Math.max(read * high, ...rates));
  return { ridge, low, high, least, most };
}

function limitLines(svg, labels, limits, { ridge, low, high, most, least, x, y, right, top }, crowd) {
  const read = limits.bytes_per_s, begin = Math.max(low, least / read), end = ridge ?? Math.min(high, most / read);
  const line = { x1: x(begin), y1: y(begin * read), x2: x(end), y2: y(end * read) }, { x1, y1, x2, y2 } = line;
  const roof = `M${x1} ${y1}L${x2} ${y2}` + (ridge ? `H${right}` : "");
  make(svg, "path", { d: `${roof}L${right} ${top}H${x1}Z`, class: "above" });
  make(svg, "path", { d: roof, class: "limit" });
  alongLine(svg, labels, `memory: ${bandwidth(read)}`, line, crowd);
  if (!ridge) return;
  const text = `arithmetic: ${operations(limits.ops_per_s)}`;
  make(svg, "text", { x: right - 4, y: y2 - 8, "text-anchor": "end", class: "strong" }, text);
  labels.taken.push([Math.min(x2, right - widthOf(text) - 6), y2 - 20, right, y2 + 2]);
}

// A text on the slope, where the fewest dots are in its way; in the corner above it if there are some everywhere.
function alongLine(svg, labels, text, { x1, y1, x2, y2 }, crowd) {
  const angle = Math.atan2(y2 - y1, x2 - x1), long = Math.hypot(x2 - x1, y2 - y1), half = widthOf(text) / 2 + 8;
  const turned = crowd.map(([cx, cy]) => [
    (cx - x1) * Math.cos(angle) + (cy - y1) * Math.sin(angle), // along the line
    (cx - x1) * Math.sin(angle) - (cy - y1) * Math.cos(angle), // above it
  ]);
  const hidden = (t) => turned.filter(([u, v]) => Math.abs(u - t * long) < half && v > -4 && v < 26).length;
  const fitting = [0.4, 0.5, 0.3, 0.6, 0.2, 0.7, 0.15, 0.8].filter((t) => Math.min(t, 1 - t) * long > half);
  const best = fitting.reduce((a, b) => (hidden(b) < hidden(a) ? b : a), 0.45), free = !hidden(best);
  const point = (t) => [x1 + t * (x2 - x1), y1 + t * (y2 - y1)], [x, y] = point(best);
  const turn = { x, y: y - 8, transform: `rotate(${(angle * 180) / Math.PI} ${x} ${y})`, "text-anchor": "middle" };
  make(svg, "text", { ...(free ? turn : { x: x1 + 8, y: y2 + 22 }), class: "strong halo" }, text);
  if (!free) labels.taken.push([x1, y2 + 8, x1 + 2 * half, y2 + 26]);
  for (let t = 0; t < 1; t += 0.02) labels.avoid(...point(t), free && Math.abs(t - best) < 0.16 ? 14 : 3);
}
