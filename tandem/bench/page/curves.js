// Tokens a second over batch or depth, and a step's time as bars.

// `series`: {stroke, faint, points}; a point has x, y, and maybe low and high (its interval), limit, tip.
function curves(box, { series, ticks, log, title, label }) {
  const height = 330, svg = canvas(box, height, title), width = svg.viewBox.baseVal.width;
  const points = series.flatMap((each) => each.points);
  const values = points.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y, p.limit ?? p.y]);
  const least = Math.min(...values) / 1.3, most = Math.max(...values) * 1.3, shown = logTicks(least, most, 8);
  const left = 14 + Math.max(...shown.map((value) => widthOf(digits(value)))), right = width - 20;
  const top = 28, bottom = height - 46, y = scale(least, most, bottom, top, true);
  const ends = [ticks[0], ticks[ticks.length - 1]];
  const x = ticks.length > 1 ? scale(...ends, left + 26, right - 26, log) : () => (left + right) / 2;
  yAxis(svg, shown, y, left, right, (value) => digits(value), "tokens per second");
  xAxis(svg, ticks, x, top, bottom, (value) => value.toLocaleString("en"), label, right);
  for (const each of series) curve(svg, each, x, y);
  const labels = new Labels(svg, left, width, top - 6, bottom);
  for (const p of points) {
    labels.avoid(x(p.x), y(p.y), 6);
    if (p.limit) labels.avoid(x(p.x), y(p.limit), 5);
  }
  for (const { points: own, stroke } of series.filter((each) => !each.faint))
    for (const p of own) labels.put(digits(p.y), x(p.x), y(p.y), 8, ABOVE, stroke);
}

function curve(svg, { points, stroke, faint }, x, y) {
  const line = (key, kind) => {
    const along = points.filter((p) => p[key]).map((p) => `${x(p.x)},${y(p[key])}`).join(" ");
    make(svg, "polyline", { points: along, stroke, class: kind });
  };
  line("limit", "allowed");
  line("y", faint ? "faint" : "curve");
  for (const p of points) {
    const cx = x(p.x), cy = y(p.y), bar = (value) => `M${cx - 4} ${y(value)}h8`;
    if (p.limit) make(svg, "path", { d: `M${cx - 5} ${y(p.limit)}h10`, stroke, class: "whisker" });
    const span = p.low && `M${cx} ${y(p.low)}V${y(p.high)}${bar(p.low)}${bar(p.high)}`;
    if (span) make(svg, "path", { d: span, stroke, class: "whisker" });
    const fill = faint ? "var(--card)" : stroke;
    make(svg, "circle", { cx, cy, r: faint ? 3 : 4.5, class: "dot", fill, stroke, "stroke-width": 1.4, tip: p.tip });
  }
}

// `profiles`: {label, launches}; a bar each, its pieces the launches in proportion to their time.
function bars(box, profiles) {
  const each = 62, svg = canvas(box, each * profiles.length, "Step time by launch"), all = svg.viewBox.baseVal.width;
  profiles.forEach(({ label, launches }, i) => {
    const top = i * each, total = launches.reduce((sum, launch) => sum + launch.seconds, 0);
    make(svg, "text", { x: 0, y: top + 14, class: "strong" }, label);
    make(svg, "text", { x: all, y: top + 14, "text-anchor": "end" }, duration(total));
    let x = 0;
    for (const { name, seconds, color: index, tip } of launches) {
      const wide = (seconds / total) * all, width = Math.max(0.6, wide - 1), rx = Math.min(4, wide / 3);
      make(svg, "rect", { x: x + 0.5, y: top + 22, width, height: 28, rx, class: "launch", fill: color(index), tip });
      const text = [`${name} ${percent(seconds / total)}`, name].find((t) => widthOf(t, 11.5) < wide - 12);
      if (text) make(svg, "text", { x: x + 7, y: top + 40, class: "inside" }, text);
      x += wide;
    }
  });
}
