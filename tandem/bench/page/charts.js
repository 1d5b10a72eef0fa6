// One function a picture: (box, what it shows) -> an SVG as wide as the box.

const color = (index) => `var(--c${Math.min(index, 9)})`;
const NARROW = 560; // pixels: below that names stand above, not beside

// ---- the roofline: operations a second over operations a byte

function roofline(box, { limits, dots, whole }) {
  const height = box.clientWidth < NARROW ? 380 : 480, svg = canvas(box, height, "Roofline");
  const width = svg.viewBox.baseVal.width, left = 62, right = width - 12, top = 26, bottom = height - 46;
  const all = [...dots, ...whole].filter((dot) => dot.ops > 0);
  const ridge = limits.ops_per_s ? limits.ops_per_s / limits.bytes_per_s : null;
  const low = Math.min(...all.map((dot) => dot.ops / dot.bytes)) / 2.5;
  const high = Math.max(...all.map((dot) => dot.ops / dot.bytes), ridge ?? 0) * 3;
  const most = 2.5 * (limits.ops_per_s ?? Math.max(limits.bytes_per_s * high, ...all.map((dot) => dot.ops / dot.seconds)));
  const least = Math.min(limits.bytes_per_s * low, ...all.map((dot) => dot.ops / dot.seconds)) / 2;
  const x = scale(low, high, left, right, true), y = scale(least, most, bottom, top, true);
  yAxis(svg, logTicks(least, most, 8), y, left, right, (v) => scaled(v, [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]), "operations a second");
  xAxis(svg, logTicks(low, high, width / 90), x, top, bottom, (v) => digits(v, 2), "operations a byte", right);
  const inside = (value) => y(Math.min(most, Math.max(least, value)));
  const place = (dot) => dot.ops > 0
    ? [x(dot.ops / dot.bytes), inside(dot.ops / dot.seconds)]
    : [left, inside((dot.bytes / dot.seconds) * low)]; // moves bytes only: as far under the line as its share of it
  const labels = new Labels(svg, left, right, top, bottom);
  limitLines(svg, labels, { limits, ridge, low, high, most, least, x, y, right, top, crowd: [...dots, ...whole].map(place) });
  const placed = dots.map((dot) => ({ ...dot, at: place(dot), radius: 3 + (width < NARROW ? 7 : 10) * Math.sqrt(dot.share) }));
  for (const dot of [...placed].sort((a, b) => b.radius - a.radius)) {
    const [cx, cy] = dot.at;
    make(svg, "circle", { cx, cy, r: dot.radius, class: "dot", fill: color(dot.color), "fill-opacity": 0.72, stroke: "var(--card)", tip: dot.tip });
    labels.avoid(cx, cy, dot.radius * 0.8);
  }
  for (const dot of whole) {
    const [cx, cy] = place(dot);
    make(svg, "path", { d: `M${cx - 6} ${cy}L${cx} ${cy - 6}L${cx + 6} ${cy}L${cx} ${cy + 6}Z`, class: "whole", fill: "var(--card)", stroke: "var(--text)", "stroke-width": 1.8, tip: dot.tip });
    labels.avoid(cx, cy, 6);
  }
  for (const dot of whole) labels.put(dot.short, ...place(dot), 9);
  const named = new Set();
  for (const dot of placed.sort((a, b) => b.share - a.share))
    if (!named.has(dot.short) && labels.put(dot.short, ...dot.at, dot.radius + 3)) named.add(dot.short);
}

function limitLines(svg, labels, { limits, ridge, low, high, most, least, x, y, right, top, crowd }) {
  const end = ridge ?? Math.min(high, most / limits.bytes_per_s);
  const begin = Math.max(low, least / limits.bytes_per_s);
  const [x1, y1, x2, y2] = [x(begin), y(begin * limits.bytes_per_s), x(end), y(end * limits.bytes_per_s)];
  const roof = ridge ? `L${right} ${y2}` : "";
  make(svg, "path", { d: `M${x1} ${y1}L${x2} ${y2}${roof}L${right} ${top}L${x1} ${top}Z`, class: "above" });
  make(svg, "path", { d: `M${x1} ${y1}L${x2} ${y2}${roof}`, class: "limit" });
  const along = (t) => [x1 + t * (x2 - x1), y1 + t * (y2 - y1)];
  const text = `memory: ${bandwidth(limits.bytes_per_s)}`, slope = Math.atan2(y2 - y1, x2 - x1);
  const turned = crowd.map(([cx, cy]) => [(cx - x1) * Math.cos(slope) + (cy - y1) * Math.sin(slope), (cx - x1) * Math.sin(slope) - (cy - y1) * Math.cos(slope)]);
  const long = Math.hypot(x2 - x1, y2 - y1), half = widthOf(text) / 2 + 8;
  const under = (t) => turned.filter(([u, v]) => Math.abs(u - t * long) < half && v > -4 && v < 26).length;
  const at = [0.4, 0.5, 0.3, 0.6, 0.2, 0.7, 0.15, 0.8].filter((t) => t * long > half && (1 - t) * long > half).reduce((best, t) => (under(t) < under(best) ? t : best), 0.45);
  const [mx, my] = along(at), free = !under(at);
  if (free) make(svg, "text", { x: mx, y: my - 8, transform: `rotate(${(slope * 180) / Math.PI} ${mx} ${my})`, "text-anchor": "middle", class: "strong halo" }, text);
  else make(svg, "text", { x: x1 + 8, y: y2 + 22, class: "strong halo" }, text);
  for (let t = 0; t < 1; t += 0.02) labels.avoid(...along(t), free && Math.abs(t - at) < 0.16 ? 14 : 3);
  if (!free) labels.taken.push([x1, y2 + 8, x1 + 2 * half, y2 + 26]);
  if (!ridge) return;
  make(svg, "text", { x: right - 4, y: y2 - 8, "text-anchor": "end", class: "strong" }, `arithmetic: ${operations(limits.ops_per_s)}`);
  labels.taken.push([x2, y2 - 20, right, y2 + 2]);
}

// ---- tokens a second over batch or depth

function curves(box, { series, ticks, log, title, label }) {
  const height = 330, svg = canvas(box, height, title), width = svg.viewBox.baseVal.width;
  const right = width - 20, top = 28, bottom = height - 46;
  const values = series.flatMap((s) => s.points.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y, ...(p.limit ? [p.limit] : [])]));
  let [least, most] = [Math.min(...values), Math.max(...values)];
  [least, most] = most / least < 1.6 ? [least / 1.25, most * 1.25] : [least / 1.3, most * 1.3];
  const shown = logTicks(least, most, 8), left = 14 + Math.max(...shown.map((v) => widthOf(digits(v))));
  const y = scale(least, most, bottom, top, true);
  const x = ticks.length > 1
    ? scale(ticks[0], ticks[ticks.length - 1], left + 26, right - 26, log)
    : () => (left + right) / 2;
  yAxis(svg, shown, y, left, right, (v) => digits(v), "tokens a second");
  xAxis(svg, ticks, x, top, bottom, (v) => v.toLocaleString("en"), label, right);
  const labels = new Labels(svg, left, width, top - 6, bottom);
  for (const s of series)
    for (const p of s.points) {
      labels.avoid(x(p.x), y(p.y), 6);
      if (p.limit) labels.avoid(x(p.x), y(p.limit), 5);
    }
  for (const s of series) {
    const line = (key, attributes) => {
      const points = s.points.filter((p) => p[key]).map((p) => `${x(p.x)},${y(p[key])}`);
      if (points.length > 1) make(svg, "polyline", { points: points.join(" "), fill: "none", stroke: s.stroke, ...attributes });
      return points;
    };
    for (const point of line("limit", { "stroke-dasharray": "2 4", "stroke-width": 1.3, "stroke-opacity": 0.8 })) {
      const [cx, cy] = point.split(",");
      make(svg, "path", { d: `M${cx - 5} ${cy}h10`, stroke: s.stroke, "stroke-width": 1.3 });
    }
    line("y", { "stroke-width": s.faint ? 1.4 : 2.2, "stroke-dasharray": s.faint ? "5 4" : "none" });
    for (const p of s.points) {
      if (p.low) make(svg, "path", { d: `M${x(p.x)} ${y(p.low)}V${y(p.high)}M${x(p.x) - 4} ${y(p.low)}h8M${x(p.x) - 4} ${y(p.high)}h8`, stroke: s.stroke, "stroke-width": 1.4 });
      make(svg, "circle", { cx: x(p.x), cy: y(p.y), r: s.faint ? 3 : 4.5, class: "dot", fill: s.faint ? "var(--card)" : s.stroke, stroke: s.stroke, "stroke-width": 1.4, tip: p.tip });
    }
  }
  for (const s of series) if (!s.faint) for (const p of s.points) labels.put(digits(p.y), x(p.x), y(p.y), 8, ABOVE, s.stroke);
}

// ---- a step's time, launch by launch

function bars(box, profiles) {
  const row = 62, svg = canvas(box, row * profiles.length, "Step time by launch"), width = svg.viewBox.baseVal.width;
  profiles.forEach((profile, i) => {
    const top = i * row, total = profile.launches.reduce((sum, each) => sum + each.seconds, 0);
    make(svg, "text", { x: 0, y: top + 14, class: "strong" }, profile.label);
    make(svg, "text", { x: width, y: top + 14, "text-anchor": "end" }, duration(total));
    let x = 0;
    for (const each of profile.launches) {
      const wide = (each.seconds / total) * width;
      make(svg, "rect", { x: x + 0.5, y: top + 22, width: Math.max(0.6, wide - 1), height: 28, rx: Math.min(4, wide / 3), class: "launch", fill: color(each.color), tip: each.tip });
      const text = [`${each.name} ${percent(each.seconds / total)}`, each.name].find((t) => widthOf(t, 11.5) < wide - 12);
      if (text) make(svg, "text", { x: x + 7, y: top + 40, class: "inside", "pointer-events": "none" }, text);
      x += wide;
    }
  });
}

// ---- rows that share an axis: names beside them, or above where there is little room

function strips(box, { rows, ticks, from, to, log, format, label, title, line, draw }) {
  const beside = box.clientWidth >= NARROW;
  const names = beside ? Math.min(250, Math.max(...rows.map((row) => widthOf(row.label))) + 18) : 0;
  const sides = beside ? Math.max(...rows.map((row) => widthOf(row.side))) + 14 : 0;
  const each = beside ? 36 : 54, height = each * rows.length + 48, svg = canvas(box, height, title);
  const width = svg.viewBox.baseVal.width, left = names + 8, right = width - sides - 8, bottom = height - 44;
  const x = scale(from, to, left, right, log);
  xAxis(svg, ticks, x, 0, bottom, format, label, right);
  if (line) make(svg, "line", { x1: x(line), x2: x(line), y1: 0, y2: bottom, class: "axis" });
  rows.forEach((row, i) => {
    const middle = i * each + (beside ? 18 : 36), y = beside ? middle + 4 : middle - 19;
    make(svg, "text", { x: 0, y, class: "strong halo" }, row.label);
    make(svg, "text", { x: width, y, "text-anchor": "end", class: `halo ${row.tone ?? ""}` }, row.side);
    draw(svg, row, x, middle);
  });
}

function rounds(box, rows) {
  const away = rows.flatMap((row) => [...row.samples, ...row.interval].map((value) => value / row.median - 1));
  const from = 1.08 * Math.min(-0.01, ...away), to = 1.08 * Math.max(0.01, ...away);
  strips(box, {
    rows, ticks: steps(from, to, box.clientWidth < NARROW ? 4 : 8), from, to, title: "Rounds", label: "from the median of tokens a second",
    format: (v) => `${v > 0 ? "+" : ""}${digits(100 * v, 2)}%`,
    draw(svg, row, x, y) {
      const [low, high] = row.interval.map((v) => x(v / row.median - 1));
      make(svg, "rect", { x: low, y: y - 9, width: Math.max(2, high - low), height: 18, rx: 4, class: "interval", fill: "var(--accent)", "fill-opacity": 0.18, tip: row.about });
      make(svg, "line", { x1: x(0), x2: x(0), y1: y - 9, y2: y + 9, stroke: "var(--accent)", "stroke-width": 2 });
      row.samples.forEach((value, i) => {
        const odd = row.outliers.includes(i), tip = `round ${i + 1}: ${digits(value)} tok/s${odd ? ", an outlier" : ""}`;
        make(svg, "circle", { cx: x(value / row.median - 1), cy: y, r: odd ? 5 : 4, class: odd ? "dot outlier" : "dot", fill: odd ? "none" : "var(--accent)", "fill-opacity": 0.7, stroke: odd ? "var(--bad)" : "var(--card)", "stroke-width": odd ? 2 : 1, "pointer-events": "all", tip });
      });
    },
  });
}

function latencies(box, rows) {
  const of = (row) => (value) => value / row.marks[0][1];
  const all = rows.flatMap((row) => row.times.map(of(row))).reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [0.95, 1.05]);
  const [from, to] = [all[0] / 1.03, all[1] * 1.03];
  strips(box, {
    rows, ticks: logTicks(from, to, box.clientWidth < NARROW ? 5 : 9), from, to, log: true, title: "Step times",
    format: (v) => `${digits(v)}x`, label: "of the median step",
    draw(svg, row, across, y) {
      const x = (value) => across(of(row)(value));
      const bins = new Map();
      for (const value of row.times) {
        const bin = Math.round(x(value) / 3) * 3;
        bins.set(bin, (bins.get(bin) ?? 0) + 1);
      }
      const most = Math.max(...bins.values());
      for (const [at, count] of bins)
        make(svg, "rect", { x: at - 1.25, y: y + 9 - Math.max(1.5, (18 * count) / most), width: 2.5, height: Math.max(1.5, (18 * count) / most), rx: 1, class: "bin", fill: "var(--accent)", "fill-opacity": 0.45 });
      for (const value of row.odd)
        make(svg, "circle", { cx: x(value), cy: y + 4, r: 3.5, class: "outlier", fill: "none", stroke: "var(--bad)", "stroke-width": 1.5, "pointer-events": "all", tip: `a step of ${duration(value)}, an outlier` });
      row.marks.forEach(([name, value], i) =>
        make(svg, "path", { d: `M${x(value)} ${y - 11}V${y + 11}`, class: "mark", stroke: "var(--text)", "stroke-width": i ? 1.2 : 2.2, "stroke-dasharray": i ? "2 2" : "none", "pointer-events": "all", tip: `${name}: ${duration(value)}` }));
    },
  });
}

// ---- how many times as fast as something else

function ratios(box, rows) {
  const ends = rows.flatMap((row) => row.ratio_interval), from = Math.min(0.95, ...ends) / 1.02, to = Math.max(1.05, ...ends) * 1.02;
  const ticks = [...new Set([...logTicks(from, to, box.clientWidth < NARROW ? 4 : 8), 1])].sort((a, b) => a - b);
  strips(box, {
    rows, ticks, from, to, log: true, title: "Ratios", line: 1, format: (v) => `${digits(v, 4)}x`, label: "tokens a second, ours over the other's",
    draw(svg, row, x, y) {
      const [low, high] = row.ratio_interval;
      const tone = low > 1 ? "var(--good)" : high < 1 ? "var(--bad)" : "var(--muted)";
      make(svg, "path", { d: `M${x(low)} ${y}H${x(high)}M${x(low)} ${y - 5}v10M${x(high)} ${y - 5}v10`, stroke: tone, "stroke-width": 2 });
      make(svg, "circle", { cx: x(row.ratio), cy: y, r: 5, class: "dot", fill: tone, stroke: "var(--card)", tip: row.tip });
    },
  });
}
