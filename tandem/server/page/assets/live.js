// The live view: tokens per second, time to first token, batch size, memory, and the roofline of a step.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { number, t } from "./i18n.js";

const EVERY = 1000; // ms between polls, while the view is open or a response streams
const WINDOW = 10; // s over which a share is taken, as few requests begin in one

export class Live {
  constructor(view, model, onRate) {
    Object.assign(this, { view, model, onRate, shown: false, busy: false });
    this.charts = {
      tokens: new Chart(t("Tokens per second"), { unit: " tok/s" }),
      sequences: new Chart(t("Batch size")),
      kv_used: new Chart(t("KV cache in use"), { unit: "%", top: 100 }),
      cached: new Chart(t("Prefix cache hits"), { unit: "%", top: 100 }),
      accepted: new Chart(t("Accepted draft tokens"), { unit: "%", top: 100 }),
    };
    document.addEventListener("visibilitychange", () => this.poll());
  }

  show(shown) {
    this.shown = shown;
    if (shown && !this.view.firstChild) this.build();
    this.poll();
  }

  /** While a response streams, the top bar shows its speed. */
  watch(busy) {
    this.busy = busy;
    this.poll();
  }

  redraw() {
    if (this.last && this.shown) this.drawCharts(this.last.history);
  }

  async poll() {
    clearTimeout(this.timer);
    if (document.hidden || !(this.shown || this.busy)) return this.onRate(t("idle"), false);
    this.timer = setTimeout(() => this.poll(), EVERY);
    if (this.polling) return undefined;
    this.polling = true;
    try {
      const { models } = await get(this.shown ? "/live?roofline=true" : "/live");
      this.update(models);
    } catch {
      this.onRate(t("offline"), false);
    } finally {
      this.polling = false;
    }
    return undefined;
  }

  update(models) {
    const name = models[this.model()] ? this.model() : Object.keys(models)[0];
    const state = models[name];
    this.last = state;
    if (!state) {
      this.onRate(t("idle"), false);
      if (this.shown) this.put("title", t("No model is loaded yet"), t("The first message loads one."));
      return;
    }
    const active = state.running > 0 || state.now.tokens_per_s > 0;
    this.onRate(active ? `${digits(state.now.tokens_per_s)} tok/s` : t("idle"), active);
    if (this.shown) this.draw(name, state, active);
  }

  // ---- the view

  build() {
    const parts = {};
    const part = (id, tag = "div") => (parts[id] = h(tag, { id: `live-${id}` }));
    const card = (title, ...children) => h("section.card", null, h("h3", null, title), ...children);
    const stat = (id, title) => h(".stat", null, h("span.label", null, title), part(id), part(`${id}-note`));
    this.view.append(h(".live-page", null,
      h("header.live-head", null, part("title", "h2"), part("title-note", "p")),
      h("section.card.hero", null,
        h(".hero-text", null, h("span.label", null, t("Tokens per second")), part("rate"), part("rate-note")),
        this.charts.tokens.node),
      h(".stats-row", null, stat("first", t("Time to first token")), stat("batch", t("Batch size")), stat("step", t("Step")),
        stat("traffic", t("Memory traffic"))),
      h(".history", null, ...["sequences", "kv_used", "cached", "accepted"].map((name) =>
        parts[name] = h("section.card", null, h("h3", null, this.charts[name].name), this.charts[name].node))),
      h(".two", null,
        card(t("Time of a decode step"), part("roof")),
        h(".stack", null, card(t("KV cache"), part("kv")), card(t("Memory"), part("memory")),
          card(t("Since startup"), part("totals"))))));
    this.parts = parts;
  }

  put(id, text, note) {
    this.parts[id].textContent = text;
    this.parts[`${id}-note`].textContent = note;
  }

  draw(name, state, active) {
    const { now, history, first_token: first, kv, memory, roofline, totals } = state;
    this.put("title", name, state.device);
    this.put("rate", active ? digits(now.tokens_per_s) : "0", active
      ? [t("{n} running", { n: number(state.running) }), state.waiting && t("{n} waiting", { n: number(state.waiting) })].filter(Boolean).join(", ")
      : t("idle"));
    this.put("first", first ? time(first.last) : "–", first ? t("median {time}", { time: time(first.median) }) : t("of the last request"));
    this.put("batch", now.sequences ? digits(now.sequences) : "–", t("sequences per step"));
    this.put("step", now.step_seconds ? time(now.step_seconds) : "–",
      now.step_seconds ? t("{share}% outside the engine", { share: number(100 * now.between, 1) }) : t("while requests run"));
    const limit = roofline?.bandwidth;
    this.put("traffic", now.bytes_per_s ? rate(now.bytes_per_s) : "–",
      limit ? t("of {rate} bandwidth", { rate: rate(limit) }) : t("bandwidth is measured when idle"));
    this.parts.accepted.hidden = !state.speculation;
    this.drawCharts(history);
    this.parts.roof.replaceChildren(...roof(roofline, now));
    this.parts.kv.replaceChildren(...kv.map(kvBar));
    this.parts.memory.replaceChildren(...memory.heaps.map(heapBar));
    this.parts.totals.replaceChildren(h("dl.totals", null, ...[[t("Responses"), totals.requests],
      [t("Generated tokens"), totals.tokens], [t("Prompt tokens"), totals.prompt_tokens], [t("Steps"), totals.steps]].flatMap(
      ([label, value]) => [h("dt", null, label), h("dd", null, number(value))])));
  }

  drawCharts({ tokens, sequences, kv_used, admitted, cached, drafted, accepted }) {
    this.charts.tokens.draw(tokens);
    this.charts.sequences.draw(sequences);
    this.charts.kv_used.draw(kv_used.map((share) => 100 * share));
    this.charts.cached.draw(shares(cached, admitted));
    this.charts.accepted.draw(shares(accepted, drafted));
  }
}

/** Percentages of the last seconds, one for each second; null where there is nothing to take a share of. */
function shares(parts, wholes) {
  const sum = (values, end) => values.slice(Math.max(0, end - WINDOW), end).reduce((a, b) => a + b, 0);
  return wholes.map((_, i) => (sum(wholes, i + 1) ? (100 * sum(parts, i + 1)) / sum(wholes, i + 1) : null));
}

/** One row for each part of the model: its time in a decode step of one token, and its minimum by memory bandwidth. */
function roof(roofline, now) {
  if (!roofline) return [h("p.note", null, t("Measured when the engine is idle."))];
  const { parts, bandwidth } = roofline;
  const max = Math.max(...parts.map((part) => part.seconds));
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  const bytes = parts.reduce((sum, part) => sum + part.nbytes, 0);
  const rows = parts.map(({ name, seconds, nbytes }) => {
    const floor = bandwidth ? Math.min(nbytes / bandwidth, seconds) : 0;
    const bar = h(".bar");
    bar.append(segment("floor", floor / max), segment("time", (seconds - floor) / max));
    const share = bandwidth ? `${Math.round((100 * floor) / seconds)}%` : "";
    return h(".part", null, h("span.part-name", null, name), h("span.part-time", null, time(seconds)), bar,
      h("span.part-share", null, share));
  });
  return [h(".key", null, swatch("floor", t("minimum time, by memory traffic")), swatch("time", t("time above the minimum"))), ...rows,
    h("p.note", null, [t("A decode step of one token takes {time} with each launch timed alone.", { time: time(total) }),
      bandwidth && t("Reading its {size} at full bandwidth takes {time}.", { size: size(bytes), time: time(bytes / bandwidth) }),
      now.step_seconds && t("A step now takes {time}.", { time: time(now.step_seconds) })].filter(Boolean).join(" "))];
}

function kvBar({ window, blocks, used, cached }) {
  const idle = Math.min(cached, blocks - used), bar = h(".bar");
  bar.append(segment("time", used / blocks), segment("soft", idle / blocks));
  const name = window ? t("sliding window of {n} tokens", { n: number(window) }) : t("full attention");
  return h(".meter", null, h(".meter-head", null, h("span", null, name),
    h("span", null, t("{n} of {all} blocks", { n: number(used), all: number(blocks) }))), bar,
    h(".key", null, swatch("time", t("in use")), swatch("soft", t("prefix cache"))));
}

function heapBar({ name, weights, kv, other, free }) {
  const all = weights + kv + other + free, bar = h(".bar");
  bar.append(segment("floor", weights / all), segment("time", kv / all), segment("soft", other / all));
  return h(".meter", null, h(".meter-head", null, h("span", null, name), h("span", null, t("{size} free", { size: size(free) }))), bar,
    h(".key", null, swatch("floor", t("weights {size}", { size: size(weights) })), swatch("time", t("KV cache {size}", { size: size(kv) })),
      swatch("soft", t("other {size}", { size: size(other) }))));
}

function segment(kind, share) {
  const node = h(`span.${kind}`);
  node.style.width = `${Math.max(0, Math.min(100, 100 * share)).toFixed(2)}%`;
  return node;
}

const swatch = (kind, text) => h("span.swatch", null, h(`i.${kind}`), text);

const digits = (value) => number(value, value < 9.95 ? 1 : 0);
const time = (s) => (s < 0.0095 ? `${number(1e3 * s, 2)} ms` : s < 0.9995 ? `${number(1e3 * s)} ms` : `${number(s, 2)} s`);
const rate = (bytes) => `${digits(bytes / 1e9)} GB/s`;

function size(bytes) {
  for (const unit of ["B", "kB", "MB"]) {
    if (bytes < 999.5) return `${number(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${number(bytes, bytes < 9.95 ? 2 : 1)} GB`;
}
