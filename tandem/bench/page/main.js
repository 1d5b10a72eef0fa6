// The page, top to bottom, from the data beside it. Text goes in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const { result, rows, older } = data;
const page = document.getElementById("page");
const pictures = [];

function card(id, title, note, wide = true) {
  const made = make(page, "section", { class: wide ? "card" : "card half", id });
  make(made, "h2", {}, title);
  if (note) make(made, "p", { class: "note" }, note);
  return made;
}

function picture(parent, draw) {
  const box = make(parent, "div", { class: "plot" });
  pictures.push({ box, draw, width: 0 });
}

function redraw(all) {
  for (const each of pictures) {
    if (!all && each.width === each.box.clientWidth) continue;
    each.width = each.box.clientWidth;
    each.draw(each.box);
  }
}

function legend(parent, entries) {
  const box = make(parent, "div", { class: "legend" });
  for (const [text, shape, fill] of entries) {
    const entry = make(box, "span");
    const key = make(entry, "svg", { width: 16, height: 12, "aria-hidden": "true" });
    if (shape === "dot") make(key, "circle", { cx: 8, cy: 6, r: 5, fill });
    else if (shape === "ring") make(key, "circle", { cx: 8, cy: 6, r: 4, fill: "none", stroke: fill, "stroke-width": 2 });
    else if (shape === "whole") make(key, "path", { d: "M3 6L8 1L13 6L8 11Z", fill: "none", stroke: fill, "stroke-width": 1.8 });
    else if (shape === "band") make(key, "rect", { x: 1, y: 1, width: 14, height: 10, rx: 3, fill, "fill-opacity": 0.3 });
    else make(key, "line", { x1: 0, x2: 16, y1: 6, y2: 6, stroke: fill, "stroke-width": 2, "stroke-dasharray": shape === "line" ? "none" : "3 3" });
    entry.append(text);
  }
}

function table(parent, head, lines) {
  const made = make(make(parent, "div", { class: "scroll" }), "table");
  const top = make(make(made, "thead"), "tr");
  for (const text of head) make(top, "th", {}, text);
  const body = make(made, "tbody");
  for (const { cells, invalid } of lines) {
    const line = make(body, "tr", invalid ? { class: "invalid" } : {});
    for (const cell of cells) {
      const [text, under] = Array.isArray(cell) ? cell : [cell];
      const made = make(line, "td", {}, text);
      if (under) make(made, "small", {}, under);
    }
  }
}

const range = ([low, high]) => `${digits(low)} to ${digits(high)}`;
const decodes = rows.filter((row) => row.kind === "decode"), prompts = rows.filter((row) => row.kind === "prefill");
const shortName = (row) => (row.kind === "prefill" ? `prompt ${row.tokens}` : `batch ${row.batch}`) + (row.depth ? ` at ${row.depth}` : "");

// ---- the head

function head() {
  const top = make(page, "header");
  make(top, "p", { class: "over" }, "tandem bench");
  make(top, "h1", {}, result.model);
  const threads = result.threads && !result.device.includes("thread") ? `, ${result.threads} threads` : "";
  make(top, "p", { class: "under" }, `${result.device}${threads}; ${bytes(result.weights_bytes)} of weights, keys and values in ${result.kv}; ${result.date.slice(0, 16).replace("T", " ")} UTC, Tandem ${result.version}`);
  make(top, "code", {}, result.command);
}

function tiles() {
  const box = make(page, "div", { class: "tiles" });
  const tile = (what, value, unit, more) => {
    const made = make(box, "div", { class: "tile" });
    make(made, "p", { class: "what" }, what);
    make(make(made, "p", { class: "value" }, `${value} `), "small", {}, unit);
    make(made, "p", { class: "more" }, more);
  };
  const good = decodes.filter((row) => row.valid);
  const one = good.reduce((a, b) => (!a || b.batch < a.batch || (b.batch === a.batch && b.depth < a.depth) ? b : a), null);
  const best = good.reduce((a, b) => (!a || b.median > a.median ? b : a), null);
  const prompt = prompts.filter((row) => row.valid).reduce((a, b) => (!a || b.median > a.median ? b : a), null);
  if (one) tile(`Decoding, ${shortName(one)}`, digits(one.median), "tok/s", `95%: ${range(one.interval)}`);
  if (best && best !== one) tile(`Most, ${shortName(best)}`, digits(best.median), "tok/s", `95%: ${range(best.interval)}`);
  if (prompt) tile(`Prompt of ${prompt.tokens}`, digits(prompt.median), "tok/s", `first token after ${duration(prompt.ttft)}`);
  if (one) tile("Of the limit", percent(one.of_roofline), one.bound, `${shortName(one)}: ${digits(one.gb_per_s)} GB/s, ${digits(one.tflop_per_s)} TFLOP/s`);
}

function alarms() {
  const invalid = rows.filter((row) => !row.valid).map((row) => `${row.label} is not valid: ${row.why}`);
  const found = [...result.notes, ...rows.flatMap((row) => row.warnings.map((text) => `${row.label}: ${text}`))];
  const list = (parent, texts) => texts.reduce((ul, text) => (make(ul, "li", {}, text), ul), make(parent, "ul"));
  if (invalid.length) list(Object.assign(card("invalid", "Not valid"), { className: "card alarm" }), invalid);
  if (!found.length) return;
  const made = make(make(page, "section", { class: "card slim", id: "warnings" }), "details");
  make(made, "summary", {}, `${found.length === 1 ? "One thing was" : `${found.length} things were`} noticed; nothing was left out of the figures`);
  list(made, found);
}

// ---- pictures

const LEAST = 1e-8; // seconds: a clock may not see what takes less
const kernels = [...new Set(Object.values(result.profiles).flat().sort((a, b) => b.seconds - a.seconds).map((each) => each.kernel))];
const profiles = Object.entries(result.profiles).map(([label, launches]) => {
  const total = launches.reduce((sum, each) => sum + each.seconds, 0);
  return { label, launches: launches.map((each) => launch({ ...each, seconds: Math.max(each.seconds, LEAST) }, label, total)) };
});

function launch(each, label, total) {
  const { bytes_per_s: read, ops_per_s: peak } = result.limits, rate = each.bytes / each.seconds, work = each.ops / each.seconds;
  const of = `${percent(rate / read)} of the bandwidth` + (peak ? `, ${percent(work / peak)} of the arithmetic` : "");
  const tip = `${each.name} (${each.kernel}), ${each.launches === 1 ? "one launch" : `${each.launches} launches`}\n${label}: ${duration(each.seconds)}, ${percent(each.seconds / total)} of the step\n${bandwidth(rate)}, ${operations(work)}\n${of}`;
  return { ...each, share: each.seconds / total, color: kernels.indexOf(each.kernel), short: each.name, tip };
}

function roof() {
  const made = card("roofline", "Roofline", "Each dot is one kernel's launches in a step, as large as its share of the time; diamonds are whole runs. The lines are what this machine was measured to allow: under the slope memory is in the way, under the flat part arithmetic. Above them nothing can be but what a cache gave.");
  const whole = rows.filter((row) => row.ops > 0).map((row) => ({
    label: row.label, ops: row.ops, bytes: row.bytes, seconds: (row.tokens * row.batch) / row.median, short: shortName(row),
    tip: `${row.label}, the whole of it\n${digits(row.median)} tok/s: ${digits(row.gb_per_s)} GB/s, ${digits(row.tflop_per_s)} TFLOP/s\n${percent(row.of_roofline)} of the limit (${row.bound})`,
  }));
  let chosen = "";
  if (profiles.length) {
    const chips = make(made, "div", { class: "chips" });
    for (const label of ["", ...profiles.map((profile) => profile.label)]) {
      const chip = make(chips, "button", { type: "button", "aria-pressed": label === chosen }, label || "all");
      chip.addEventListener("click", () => {
        chosen = label;
        for (const other of chips.children) other.setAttribute("aria-pressed", other === chip);
        redraw(true);
      });
    }
  }
  picture(made, (box) => roofline(box, {
    limits: result.limits,
    dots: profiles.filter((profile) => !chosen || profile.label === chosen).flatMap((profile) => profile.launches),
    whole: whole.filter((row) => !chosen || row.label === chosen),
  }));
  legend(made, [["a whole run", "whole", "var(--text)"], ...kernels.map((name, i) => [name, "dot", color(i)])]);
  if (!profiles.length) make(made, "p", { class: "note" }, "With --profile each kernel is a dot.");
  make(made, "p", { class: "note" }, `Memory: ${result.limits.bytes_from}.` + (result.limits.ops_from ? ` Arithmetic: ${result.limits.ops_from}.` : " The limit of arithmetic is not known here."));
}

function series(groups, x, withOlder) {
  const found = [];
  const points = (members, of, tell) => members.filter((row) => of(row)).map((row) => ({ x: x(row), ...of(row), tip: tell(row) })).sort((a, b) => a.x - b.x);
  groups.forEach(([name, members], i) => {
    const limit = (row) => (row.valid ? row.median / row.of_roofline : null);
    const now = points(members, (row) => ({ y: row.median, low: row.interval[0], high: row.interval[1], limit: limit(row) }),
      (row) => `${row.label}\n${digits(row.median)} tok/s (95%: ${range(row.interval)})\n${percent(row.of_roofline)} of the limit (${row.bound})`);
    found.push({ name, stroke: color(i), points: now });
    const before = (row) => withOlder && older?.rows[row.label];
    const old = points(members, (row) => before(row) && { y: before(row) }, (row) => `${row.label}, the older run\n${digits(before(row))} tok/s`);
    if (old.length) found.push({ name: `${name}, older`, stroke: color(i), faint: true, points: old });
  });
  return found;
}

function by(list, key) {
  const groups = new Map();
  for (const row of list) groups.set(key(row), [...(groups.get(key(row)) ?? []), row]);
  return [...groups];
}

function curveCard(id, title, groups, { x, log, label, hint, withOlder }) {
  const drawn = series(groups, x, withOlder), faint = drawn.some((s) => s.faint) ? " Broken lines: the older run." : "";
  const made = card(id, title, `Medians with their 95% interval. Dotted: what the machine allows.${faint}`, false);
  const ticks = [...new Set(groups.flatMap(([, members]) => members.map(x)))].sort((a, b) => a - b);
  picture(made, (box) => curves(box, { series: drawn, ticks, log, title, label }));
  legend(made, drawn.filter((s) => !s.faint).map((s) => [s.name, "line", s.stroke]));
  if (ticks.length < 2) make(made, "p", { class: "note" }, hint);
}

function speeds() {
  const depth = (row) => (row.depth ? `from depth ${row.depth.toLocaleString("en")}` : "from the beginning");
  if (decodes.length)
    curveCard("batch", "Tokens a second by batch", by(decodes, depth), { x: (row) => row.batch, log: true, withOlder: true, label: "sequences at a time", hint: "More than one batch: -b 1,8,32." });
  const deep = by(rows, (row) => (row.kind === "prefill" ? `prompt of ${row.tokens}` : `batch ${row.batch}`));
  curveCard("depth", "Tokens a second by depth", deep, { x: (row) => row.depth, label: "tokens before", hint: "More than one depth: -d 0,4096." });
}

function launches() {
  if (!profiles.length) return;
  const made = card("launches", "Where a step's time goes", "Each launch run alone, in the first step of a test; the sum is a little more than a step takes.");
  picture(made, (box) => bars(box, profiles));
  legend(made, kernels.map((name, i) => [name, "dot", color(i)]));
  const more = make(made, "details");
  make(more, "summary", {}, "All launches");
  for (const profile of profiles) {
    make(more, "p", { class: "note" }, profile.label);
    table(more, ["makes", "kernel", "launches", "time", "share", "bandwidth", "arithmetic"], profile.launches.map((each) => ({
      cells: [each.name, each.kernel, String(each.launches), duration(each.seconds), percent(each.share), bandwidth(each.bytes / each.seconds), operations(each.ops / each.seconds)],
    })));
  }
}

function distributions() {
  const made = card("rounds", "Rounds", `Every one of the ${result.rounds} rounds of a test, as it departs from their median. Nothing is left out: outliers are marked, and count.`);
  picture(made, (box) => rounds(box, rows.map((row) => ({ ...row, side: `${digits(row.median)} tok/s`, about: `median ${digits(row.median)} tok/s\n95%: ${range(row.interval)}` }))));
  legend(made, [["a round", "dot", "var(--accent)"], ["an outlier", "ring", "var(--bad)"], ["the median's 95% interval", "band", "var(--accent)"]]);
  const timed = rows.filter((row) => row.times.length);
  if (!timed.length) return;
  const steps = card("latency", "Step times", "What a reader waits between tokens: every step of all rounds, over the median of its test. The full line is the median, the broken ones the 90th and 99th of a hundred.");
  picture(steps, (box) => latencies(box, timed.map((row) => ({ ...row, side: `${duration(row.marks[0][1])}, p99 ${duration(row.marks[2][1])}` }))));
  legend(steps, [["steps", "band", "var(--accent)"], ["an outlier", "ring", "var(--bad)"]]);
}

function comparisons() {
  for (const { id, title, note, rows: compared } of data.comparisons) {
    const made = card(id, title, note);
    picture(made, (box) => ratios(box, compared.map((row) => ({
      ...row, side: `${digits(row.ratio)}x${row.verdict && `, ${row.verdict}`}`,
      tone: row.ratio_interval[0] > 1 ? "good" : row.ratio_interval[1] < 1 ? "bad" : "",
      tip: `${row.label}\n${digits(row.new)} tok/s against ${digits(row.old)}\n${digits(row.ratio)}x (95%: ${range(row.ratio_interval)})`,
    }))));
  }
}

function figures() {
  const made = card("figures", "All figures", "Medians; under them the 95% interval.");
  const energy = rows.some((row) => row.energy);
  table(made, ["test", "tok/s", "ms a step", "first token", "GB/s", "TFLOP/s", "of the limit", ...(energy ? ["J a token", "W"] : [])], rows.map((row) => ({
    invalid: !row.valid,
    cells: [
      [row.label, row.valid ? "" : "not valid"], [digits(row.median), range(row.interval)],
      digits((1e3 * row.tokens * row.batch) / row.median / row.steps),
      [duration(row.ttft), `${duration(row.ttft_interval[0])} to ${duration(row.ttft_interval[1])}`],
      digits(row.gb_per_s), digits(row.tflop_per_s), [percent(row.of_roofline), row.bound],
      ...(energy ? [row.energy ? digits(row.energy.joules_per_token) : "", row.energy ? digits(row.energy.watts) : ""] : []),
    ],
  })));
}

function foot() {
  const { machine, peer } = result, made = make(page, "footer");
  make(made, "p", {}, `${machine.cpu}, ${machine.cores} cores, ${bytes(machine.memory_bytes)}, Linux ${machine.kernel}, Python ${machine.python}` + (machine.governor ? `, governor ${machine.governor}` : "") + `; load before ${digits(machine.load_before)}.`);
  if (peer) make(made, "p", {}, `${peer.name} ${peer.version}: ${peer.build}`);
  make(made, "p", {}, "This file holds its data and asks nothing of the network.");
}

for (const part of [head, tiles, alarms, roof, speeds, launches, distributions, comparisons, figures, foot]) part();
follow(document.getElementById("tip"));
new ResizeObserver(() => redraw(false)).observe(page);
redraw(true);
