// The page, top to bottom, from the data beside it. Text goes in as text, never as markup.

const { result, rows, older, comparisons } = JSON.parse(document.getElementById("data").textContent);
const decodes = rows.filter((row) => row.kind === "decode"), prompts = rows.filter((row) => row.kind === "prefill");

const range = ([low, high]) => `${digits(low)} to ${digits(high)}`;
const speed = (value) => `${digits(value)} tok/s`;
const interval = (row) => `95%: ${range(row.interval)}`;
const atDepth = (row) => (row.depth ? ` at ${row.depth}` : "");
const shortName = (row) => (row.kind === "prefill" ? `prompt ${row.tokens}` : `batch ${row.batch}`) + atDepth(row);
const ofLimit = (row) => `${percent(row.of_roofline)} of the limit (${row.bound})`;
const rates = (row) => `${digits(row.gb_per_s)} GB/s, ${digits(row.tflop_per_s)} TOP/s`;

// ---- the head

function head() {
  const top = make(page, "header"), { device, threads, kv, date, version } = result;
  make(top, "p", { class: "over" }, "tandem bench");
  make(top, "h1", {}, result.model);
  const on = threads && !device.includes("thread") ? `${device}, ${threads} threads` : device;
  const what = `${bytes(result.weights_bytes)} of weights, keys and values in ${kv}`;
  const when = `${date.slice(0, 16).replace("T", " ")} UTC, Tandem ${version}`;
  make(top, "p", { class: "under" }, `${on}; ${what}; ${when}`);
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
  const valid = (list) => list.filter((row) => row.valid), faster = (a, b) => b.median - a.median;
  const [one] = valid(decodes).sort((a, b) => a.batch - b.batch || a.depth - b.depth);
  const [most] = valid(decodes).sort(faster), [prompt] = valid(prompts).sort(faster);
  if (one) tile(`Decoding, ${shortName(one)}`, digits(one.median), "tok/s", interval(one));
  if (most && most !== one) tile(`Most, ${shortName(most)}`, digits(most.median), "tok/s", interval(most));
  if (prompt) {
    const first = `first token after ${duration(prompt.ttft)}`;
    tile(`Prompt of ${prompt.tokens}`, digits(prompt.median), "tok/s", first);
  }
  if (one) tile("Of the limit", percent(one.of_roofline), one.bound, `${shortName(one)}: ${rates(one)}`);
}

function alarms() {
  const invalid = rows.filter((row) => !row.valid).map((row) => `${row.label} is not valid: ${row.why}`);
  const noticed = [...result.notes, ...rows.flatMap((row) => row.warnings.map((text) => `${row.label}: ${text}`))];
  if (invalid.length) list(card("invalid", "Not valid", "", "card alarm"), invalid);
  if (!noticed.length) return;
  const made = make(make(page, "section", { class: "card slim", id: "warnings" }), "details");
  const count = noticed.length === 1 ? "One thing was" : `${noticed.length} things were`;
  make(made, "summary", {}, `${count} noticed; nothing was left out of the figures`);
  list(made, noticed);
}

// ---- kernels

const LEAST = 1e-8; // seconds: a clock may not see what takes less
const longest = Object.values(result.profiles).flat().sort((a, b) => b.seconds - a.seconds);
const kernels = [...new Set(longest.map((each) => each.kernel))];
const kernelKeys = kernels.map((name, i) => [name, "dot", color(i)]);
const profiles = Object.entries(result.profiles).map(([label, launches]) => {
  const seen = launches.map((each) => ({ ...each, seconds: Math.max(each.seconds, LEAST) }));
  const total = seen.reduce((sum, each) => sum + each.seconds, 0);
  return { label, launches: seen.map((each) => launch(each, label, total)) };
});

function launch(each, label, total) {
  const { bytes_per_s: read, ops_per_s: peak } = result.limits, share = each.seconds / total;
  const moved = each.bytes / each.seconds, worked = each.ops / each.seconds;
  const tip = [
    `${each.name} (${each.kernel}), ${each.launches === 1 ? "one launch" : `${each.launches} launches`}`,
    `${label}: ${duration(each.seconds)}, ${percent(share)} of the step`,
    `${bandwidth(moved)}, ${operations(worked)}`,
    `${percent(moved / read)} of the bandwidth` + (peak ? `, ${percent(worked / peak)} of the arithmetic` : ""),
  ];
  const cells = [bandwidth(moved), operations(worked)];
  return { ...each, share, cells, color: kernels.indexOf(each.kernel), short: each.name, tip: tip.join("\n") };
}

const ROOF = `Each dot is one kernel's launches in a step, as large as its share of the time; diamonds are whole runs.
  The lines are what this machine was measured to allow: under the slope memory is in the way, under the flat part
  arithmetic. Above them nothing can be but what a cache gave.`;

function roof() {
  const made = card("roofline", "Roofline", ROOF), { bytes_from: read, ops_from: peak } = result.limits;
  const whole = rows.filter((row) => row.ops > 0).map((row) => ({
    label: row.label, ops: row.ops, bytes: row.bytes, seconds: (row.tokens * row.batch) / row.median,
    short: shortName(row), tip: `${row.label}, the whole of it\n${speed(row.median)}: ${rates(row)}\n${ofLimit(row)}`,
  }));
  let chosen = "";
  const shown = ({ label }) => !chosen || label === chosen;
  if (profiles.length) chips(made, ["", ...profiles.map(({ label }) => label)], (label) => (chosen = label));
  picture(made, (box) => {
    const dots = profiles.filter(shown).flatMap(({ launches }) => launches);
    roofline(box, { limits: result.limits, dots, whole: whole.filter(shown) });
  });
  legend(made, [["a whole run", "whole", "var(--text)"], ...kernelKeys]);
  if (!profiles.length) make(made, "p", { class: "note" }, "With --profile each kernel is a dot.");
  const arithmetic = peak ? `Arithmetic: ${peak}.` : "The limit of arithmetic is not known here.";
  make(made, "p", { class: "note" }, `Memory: ${read}. ${arithmetic}`);
}

function chips(parent, labels, choose) {
  const box = make(parent, "div", { class: "chips" });
  labels.forEach((label, i) => {
    const chip = make(box, "button", { type: "button", "aria-pressed": i === 0 }, label || "all");
    chip.addEventListener("click", () => {
      for (const other of box.children) other.setAttribute("aria-pressed", other === chip);
      choose(label);
      redraw(true);
    });
  });
}

function launches() {
  if (!profiles.length) return;
  const note = "Each launch run alone, in the first step of a test; the sum is a little more than a step takes.";
  const made = card("launches", "Where a step's time goes", note);
  picture(made, (box) => bars(box, profiles));
  legend(made, kernelKeys);
  const more = make(made, "details");
  make(more, "summary", {}, "All launches");
  for (const { label, launches: each } of profiles) {
    make(more, "p", { class: "note" }, label);
    const lines = each.map(({ name, kernel, launches: count, seconds, share, cells }) => ({
      cells: [name, kernel, String(count), duration(seconds), percent(share), ...cells],
    }));
    table(more, ["makes", "kernel", "launches", "time", "share", "bandwidth", "arithmetic"], lines);
  }
}

// ---- speeds

function by(list, key) {
  const groups = new Map();
  for (const row of list) groups.set(key(row), [...(groups.get(key(row)) ?? []), row]);
  return [...groups];
}

// A line for each group of rows, and a faint one for what the older run had of them.
function series(groups, x, withOlder) {
  const along = (points) => points.sort((a, b) => a.x - b.x);
  return groups.flatMap(([name, members], i) => {
    const now = members.map((row) => ({
      x: x(row), y: row.median, low: row.interval[0], high: row.interval[1],
      limit: row.valid ? row.median / row.of_roofline : null,
      tip: `${row.label}\n${speed(row.median)} (${interval(row)})\n${ofLimit(row)}`,
    }));
    const before = members.filter((row) => withOlder && older?.rows[row.label]).map((row) => {
      const y = older.rows[row.label];
      return { x: x(row), y, tip: `${row.label}, the older run\n${speed(y)}` };
    });
    const lines = [{ name, stroke: color(i), points: along(now) }];
    return before.length ? [...lines, { stroke: color(i), faint: true, points: along(before) }] : lines;
  });
}

function curveCard(id, title, groups, { x, log, label, hint, withOlder }) {
  const drawn = series(groups, x, withOlder), own = drawn.filter((each) => !each.faint);
  const faint = drawn.length > own.length ? " Broken lines: the older run." : "";
  const note = `Medians with their 95% interval. Dotted: what the machine allows.${faint}`;
  const made = card(id, title, note, "card half");
  const ticks = [...new Set(groups.flatMap(([, members]) => members.map(x)))].sort((a, b) => a - b);
  picture(made, (box) => curves(box, { series: drawn, ticks, log, title, label }));
  legend(made, own.map(({ name, stroke }) => [name, "line", stroke]));
  if (ticks.length < 2) make(made, "p", { class: "note" }, hint);
}

function speeds() {
  const depth = (row) => (row.depth ? `from depth ${row.depth.toLocaleString("en")}` : "from the beginning");
  if (decodes.length)
    curveCard("batch", "Tokens a second by batch", by(decodes, depth), {
      x: (row) => row.batch, log: true, withOlder: true, label: "sequences at a time",
      hint: "More than one batch: -b 1,8,32.",
    });
  const kind = (row) => (row.kind === "prefill" ? `prompt of ${row.tokens}` : `batch ${row.batch}`);
  curveCard("depth", "Tokens a second by depth", by(rows, kind), {
    x: (row) => row.depth, label: "tokens before", hint: "More than one depth: -d 0,4096.",
  });
}

// ---- distributions

function distributions() {
  const count = `Every one of the ${result.rounds} rounds of a test, as it departs from their median.`;
  const made = card("rounds", "Rounds", `${count} Nothing is left out: outliers are marked, and count.`);
  const about = (row) => `median ${speed(row.median)}\n${interval(row)}`;
  const strip = rows.map((row) => ({ ...row, side: speed(row.median), about: about(row) }));
  picture(made, (box) => rounds(box, strip));
  const odd = ["an outlier", "ring", "var(--bad)"];
  const band = ["the median's 95% interval", "band", "var(--accent)"];
  legend(made, [["a round", "dot", "var(--accent)"], odd, band]);
  stepTimes(odd);
}

const STEPS = `What a reader waits between tokens: every step of all rounds, over the median of its test. The full line
  is the median, the broken ones the 90th and 99th of a hundred.`;

function stepTimes(odd) {
  const timed = rows.filter((row) => row.times.length);
  if (!timed.length) return;
  const side = ({ marks: [[, middle], , [, late]] }) => `${duration(middle)}, p99 ${duration(late)}`;
  const made = card("latency", "Step times", STEPS);
  const strip = timed.map((row) => ({ ...row, side: side(row) }));
  picture(made, (box) => latencies(box, strip));
  legend(made, [["steps", "band", "var(--accent)"], odd]);
}

function compared() {
  for (const { id, title, note, rows: pairs } of comparisons) {
    const strip = pairs.map((row) => {
      const [low, high] = row.ratio_interval, ratio = `${digits(row.ratio)}x`;
      const both = `${speed(row.new)} against ${digits(row.old)}`;
      const tip = `${row.label}\n${both}\n${ratio} (95%: ${range(row.ratio_interval)})`;
      const tone = low > 1 ? "good" : high < 1 ? "bad" : "";
      return { ...row, side: row.verdict ? `${ratio}, ${row.verdict}` : ratio, tone, tip };
    });
    picture(card(id, title, note), (box) => ratios(box, strip));
  }
}

// ---- figures

function figures() {
  const made = card("figures", "All figures", "Medians; under them the 95% interval.");
  const columns = ["test", "tok/s", "ms per step", "first token", "GB/s", "TOP/s", "of the limit"];
  const energy = rows.some((row) => row.energy);
  const lines = rows.map((row) => {
    const joules = row.energy ? [digits(row.energy.joules_per_token), digits(row.energy.watts)] : ["", ""];
    const cells = [
      [row.label, row.valid ? "" : "not valid"], [digits(row.median), range(row.interval)],
      digits((1e3 * row.tokens * row.batch) / row.median / row.steps),
      [duration(row.ttft), row.ttft_interval.map(duration).join(" to ")],
      digits(row.gb_per_s), digits(row.tflop_per_s), [percent(row.of_roofline), row.bound],
    ];
    return { invalid: !row.valid, cells: energy ? [...cells, ...joules] : cells };
  });
  table(made, energy ? [...columns, "J a token", "W"] : columns, lines);
}

function foot() {
  const { machine, peer } = result, made = make(page, "footer");
  const parts = [
    machine.cpu, `${machine.cores} cores`, bytes(machine.memory_bytes), `Linux ${machine.kernel}`,
    `Python ${machine.python}`,
    ...(machine.governor ? [`governor ${machine.governor}`] : []),
  ];
  make(made, "p", {}, `${parts.join(", ")}; load before ${digits(machine.load_before)}.`);
  if (peer) make(made, "p", {}, `${peer.name} ${peer.version}: ${peer.build}`);
  make(made, "p", {}, "This file holds its data and asks nothing of the network.");
}

for (const part of [head, tiles, alarms, roof, speeds, launches, distributions, compared, figures, foot]) part();
follow(document.getElementById("tip"));
new ResizeObserver(() => redraw(false)).observe(page);
redraw(true);
