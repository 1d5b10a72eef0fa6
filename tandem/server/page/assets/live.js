// The live view: tokens per second, time to first token, batch size, memory, and the roofline of a step.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { h } from "./dom.js";

const EVERY = 1000; // ms between polls, while the view is open or a response streams

export class Live {
  constructor(view, model, onRate) {
    Object.assign(this, { view, model, onRate, shown: false, busy: false });
    this.chart = new Chart();
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
    if (this.last && this.shown) this.chart.draw(this.last.history.tokens);
  }

  async poll() {
    clearTimeout(this.timer);
    if (document.hidden || !(this.shown || this.busy)) return this.onRate("idle", false);
    this.timer = setTimeout(() => this.poll(), EVERY);
    if (this.polling) return undefined;
    this.polling = true;
    try {
      const { models } = await get(this.shown ? "/live?roofline=true" : "/live");
      this.update(models);
    } catch {
      this.onRate("offline", false);
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
      this.onRate("idle", false);
      if (this.shown) this.put("title", "No model is loaded yet", "The first message loads one.");
      return;
    }
    const active = state.running > 0 || state.now.tokens_per_s > 0;
    this.onRate(active ? `${digits(state.now.tokens_per_s)} tok/s` : "idle", active);
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
        h(".hero-text", null, h("span.label", null, "Tokens per second"), part("rate"), part("rate-note")),
        this.chart.node),
      h(".stats-row", null, stat("first", "Time to first token"), stat("batch", "Batch size"), stat("step", "Step"),
        stat("traffic", "Memory traffic")),
      h(".two", null,
        card("Time of a decode step", part("roof")),
        h(".stack", null, card("KV cache", part("kv")), card("Memory", part("memory")),
          card("Since startup", part("totals"))))));
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
      ? `${state.running} running${state.waiting ? `, ${state.waiting} waiting` : ""}` : "idle");
    this.put("first", first ? time(first.last) : "–", first ? `median ${time(first.median)}` : "of the last request");
    this.put("batch", now.sequences ? digits(now.sequences) : "–", "sequences per step");
    this.put("step", now.step_seconds ? time(now.step_seconds) : "–",
      now.step_seconds ? `${(100 * now.between).toFixed(1)}% outside the engine` : "while requests run");
    const limit = roofline?.bandwidth;
    this.put("traffic", now.bytes_per_s ? rate(now.bytes_per_s) : "–",
      limit ? `of ${rate(limit)} bandwidth` : "bandwidth is measured when idle");
    this.chart.draw(history.tokens);
    this.parts.roof.replaceChildren(...roof(roofline, now));
    this.parts.kv.replaceChildren(...kv.map(kvBar));
    this.parts.memory.replaceChildren(...memory.heaps.map(heapBar));
    this.parts.totals.replaceChildren(h("dl.totals", null, ...[["Responses", totals.requests],
      ["Generated tokens", totals.tokens], ["Prompt tokens", totals.prompt_tokens], ["Steps", totals.steps]].flatMap(
      ([label, value]) => [h("dt", null, label), h("dd", null, value.toLocaleString("en"))])));
  }
}

/** One row for each part of the model: its time in a decode step of one token, and its minimum by memory bandwidth. */
function roof(roofline, now) {
  if (!roofline) return [h("p.note", null, "Measured when the engine is idle.")];
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
  const minimum = bandwidth ? `; reading its ${size(bytes)} at full bandwidth takes ${time(bytes / bandwidth)}` : "";
  return [h(".key", null, swatch("floor", "minimum time, by memory traffic"), swatch("time", "time above the minimum")), ...rows,
    h("p.note", null, `A decode step of one token takes ${time(total)} with each launch timed alone${minimum}.`
      + (now.step_seconds ? ` A step now takes ${time(now.step_seconds)}.` : ""))];
}

function kvBar({ window, blocks, used, cached }) {
  const idle = Math.min(cached, blocks - used), bar = h(".bar");
  bar.append(segment("time", used / blocks), segment("soft", idle / blocks));
  const name = window ? `sliding window of ${window} tokens` : "full attention";
  return h(".meter", null, h(".meter-head", null, h("span", null, name),
    h("span", null, `${used.toLocaleString("en")} of ${blocks.toLocaleString("en")} blocks`)), bar,
    h(".key", null, swatch("time", "in use"), swatch("soft", "prefix cache")));
}

function heapBar({ name, weights, kv, other, free }) {
  const all = weights + kv + other + free, bar = h(".bar");
  bar.append(segment("floor", weights / all), segment("time", kv / all), segment("soft", other / all));
  return h(".meter", null, h(".meter-head", null, h("span", null, name), h("span", null, `${size(free)} free`)), bar,
    h(".key", null, swatch("floor", `weights ${size(weights)}`), swatch("time", `KV cache ${size(kv)}`),
      swatch("soft", `other ${size(other)}`)));
}

function segment(kind, share) {
  const node = h(`span.${kind}`);
  node.style.width = `${Math.max(0, Math.min(100, 100 * share)).toFixed(2)}%`;
  return node;
}

const swatch = (kind, text) => h("span.swatch", null, h(`i.${kind}`), text);

const digits = (value) => (value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const time = (s) => (s < 0.0095 ? `${(1e3 * s).toFixed(2)} ms` : s < 0.9995 ? `${Math.round(1e3 * s)} ms` : `${s.toFixed(2)} s`);
const rate = (bytes) => `${digits(bytes / 1e9)} GB/s`;

function size(bytes) {
  for (const unit of ["B", "kB", "MB"]) {
    if (bytes < 999.5) return `${Math.round(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(bytes < 9.95 ? 2 : 1)} GB`;
}
