// Rows that share an axis: rounds, step times, ratios. Names stand beside them, or above where there is little room.

// A row has label, side (a text at the right) and maybe tone; draw(svg, row, x, y) fills it.
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

const ticksFor = (box, few, many) => (box.clientWidth < NARROW ? few : many);

function rounds(box, rows) {
  const away = rows.flatMap((row) => [...row.samples, ...row.interval].map((value) => value / row.median - 1));
  const from = 1.08 * Math.min(-0.01, ...away), to = 1.08 * Math.max(0.01, ...away);
  strips(box, {
    rows, from, to, ticks: steps(from, to, ticksFor(box, 4, 8)), title: "Rounds",
    label: "from the median of tokens per second", format: (value) => `${value > 0 ? "+" : ""}${digits(100 * value, 2)}%`,
    draw(svg, row, x, y) {
      const [low, high] = row.interval.map((value) => x(value / row.median - 1)), width = Math.max(2, high - low);
      make(svg, "rect", { x: low, y: y - 9, width, height: 18, rx: 4, class: "interval", tip: row.about });
      make(svg, "line", { x1: x(0), x2: x(0), y1: y - 9, y2: y + 9, class: "median" });
      row.samples.forEach((value, i) => {
        const odd = row.outliers.includes(i), name = odd ? "an outlier, round" : "round";
        const tip = `${name} ${i + 1}: ${digits(value)} tok/s`, cx = x(value / row.median - 1);
        make(svg, "circle", { cx, cy: y, r: odd ? 5 : 4, class: odd ? "dot outlier" : "dot sample", tip });
      });
    },
  });
}

const BIN = 3; // pixels

function latencies(box, rows) {
  const of = (row, value) => value / row.marks[0][1];
  const all = rows.flatMap((row) => row.times.map((value) => of(row, value)));
  const [least, most] = all.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [0.95, 1.05]);
  const from = least / 1.03, to = most * 1.03;
  strips(box, {
    rows, from, to, log: true, ticks: logTicks(from, to, ticksFor(box, 5, 9)), title: "Step times",
    label: "of the median step", format: (value) => `${digits(value)}x`,
    draw(svg, row, across, y) {
      const x = (value) => across(of(row, value)), bins = new Map();
      for (const value of row.times) {
        const at = BIN * Math.round(x(value) / BIN);
        bins.set(at, (bins.get(at) ?? 0) + 1);
      }
      const highest = Math.max(...bins.values());
      for (const [at, count] of bins) {
        const height = Math.max(1.5, (18 * count) / highest);
        make(svg, "rect", { x: at - 1.25, y: y + 9 - height, width: 2.5, height, rx: 1, class: "bin" });
      }
      for (const value of row.odd) {
        const tip = `an outlier, a step of ${duration(value)}`;
        make(svg, "circle", { cx: x(value), cy: y + 4, r: 3.5, class: "outlier", tip });
      }
      for (const [name, value] of row.marks) {
        const d = `M${x(value)} ${y - 11}v22`;
        make(svg, "path", { d, class: `mark ${name}`, tip: `${name}: ${duration(value)}` });
      }
    },
  });
}

// How many times as fast as something else.
function ratios(box, rows) {
  const ends = rows.flatMap((row) => row.ratio_interval);
  const from = Math.min(0.95, ...ends) / 1.02, to = Math.max(1.05, ...ends) * 1.02;
  const ticks = [...new Set([...logTicks(from, to, ticksFor(box, 4, 8)), 1])].sort((a, b) => a - b);
  strips(box, {
    rows, from, to, log: true, ticks, line: 1, title: "Ratios",
    label: "tokens per second, ours over the other's", format: (value) => `${digits(value, 4)}x`,
    draw(svg, row, x, y) {
      const [low, high] = row.ratio_interval;
      const stroke = low > 1 ? "var(--good)" : high < 1 ? "var(--bad)" : "var(--muted)";
      const whiskers = `M${x(low)} ${y - 5}v10M${x(high)} ${y - 5}v10`;
      make(svg, "path", { d: `M${x(low)} ${y}H${x(high)}${whiskers}`, stroke, "stroke-width": 2 });
      make(svg, "circle", { cx: x(row.ratio), cy: y, r: 5, class: "dot kernel", fill: stroke, tip: row.tip });
    },
  });
}
