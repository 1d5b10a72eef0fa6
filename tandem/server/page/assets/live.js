// What the machine is doing: tokens a second, waiting times, batches, memory, and a step against the roofline.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { h } from "./dom.js";

const EVERY = 1000; // ms, and only while someone looks or waits for an answer

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

  /** While an answer comes, its speed is shown. */
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
    if (this.asking) return undefined;
    this.asking = true;
    try {
      const { models } = await get(this.shown ? "/live?roofline=true" : "/live");
      this.update(models);
    } catch {
      this.onRate("offline", false);
    } finally {
      this.asking = false;
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
        h(".hero-text", null, h("span.label", null, "Tokens a second"), part("rate"), part("rate-note")),
        this.chart.node),
      h(".stats-row", null, stat("first", "First token"), stat("batch", "Batch"), stat("step", "Step"),
        stat("traffic", "Memory traffic")),
      h(".two", null,
        card("Where a step's time goes", part("roof")),
        h(".stack", null, card("Keys and values", part("kv")), card("Memory", part("memory")),
          card("Since the start", part("totals"))))));
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
      ? `${state.running} answering${state.waiting ? `, ${state.waiting} waiting` : ""}` : "idle");
    this.put("first", first ? time(first.last) : "–", first ? `median ${time(first.median)}` : "of the last request");
    this.put("batch", now.sequences ? digits(now.sequences) : "–", "sequences a step");
    this.put("step", now.step_seconds ? time(now.step_seconds) : "–",
      now.step_seconds ? `${(100 * now.between).toFixed(1)}% outside the engine` : "while it answers");
    const limit = roofline?.bandwidth;
    this.put("traffic", now.bytes_per_s ? rate(now.bytes_per_s) : "–",
      limit ? `of ${rate(limit)} the memory gives` : "the limit is measured when idle");
    this.chart.draw(history.tokens);
    this.parts.roof.replaceChildren(...roof(roofline, now));
    this.parts.kv.replaceChildren(...kv.map(kvBar));
    this.parts.memory.replaceChildren(...memory.heaps.map(heapBar));
    this.parts.totals.replaceChildren(h("dl.totals", null, ...[["Answers", totals.requests],
      ["Tokens written", totals.tokens], ["Tokens read", totals.prompt_tokens], ["Steps", totals.steps]].flatMap(
      ([label, value]) => [h("dt", null, label), h("dd", null, value.toLocaleString("en"))])));
  }
}

/** One row for each part of the model: its time in a step of one token, and the least it could be. */
function roof(roofline, now) {
  if (!roofline) return [h("p.note", null, "Measured when the engine has a moment to spare.")];
  const { parts, bandwidth } = roofline;
  const most = Math.max(...parts.map((part) => part.seconds));
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  const bytes = parts.reduce((sum, part) => sum + part.nbytes, 0);
  const rows = parts.map(({ name, seconds, nbytes }) => {
    const floor = bandwidth ? Math.min(nbytes / bandwidth, seconds) : 0;
    const bar = h(".bar");
    bar.append(segment("floor", floor / most), segment("time", (seconds - floor) / most));
    const share = bandwidth ? `${Math.round((100 * floor) / seconds)}%` : "";
    return h(".part", null, h("span.part-name", null, name), h("span.part-time", null, time(seconds)), bar,
      h("span.part-share", null, share));
  });
  const least = bandwidth ? `; at the memory's speed its ${size(bytes)} take ${time(bytes / bandwidth)}` : "";
  return [h(".key", null, swatch("floor", "least time, by the bytes it moves"), swatch("time", "above it")), ...rows,
    h("p.note", null, `One token alone takes ${time(total)} when each launch is timed by itself${least}.`
      + (now.step_seconds ? ` A step now takes ${time(now.step_seconds)}.` : ""))];
}

function kvBar({ window, blocks, used, shareable }) {
  const cached = Math.min(shareable, blocks - used), bar = h(".bar");
  bar.append(segment("time", used / blocks), segment("soft", cached / blocks));
  const name = window ? `last ${window} positions` : "all positions";
  return h(".meter", null, h(".meter-head", null, h("span", null, name),
    h("span", null, `${used.toLocaleString("en")} of ${blocks.toLocaleString("en")} blocks`)), bar,
    h(".key", null, swatch("time", "in use"), swatch("soft", "kept for prompts that begin alike")));
}

function heapBar({ name, weights, kv, other, free }) {
  const all = weights + kv + other + free, bar = h(".bar");
  bar.append(segment("floor", weights / all), segment("time", kv / all), segment("soft", other / all));
  return h(".meter", null, h(".meter-head", null, h("span", null, name), h("span", null, `${size(free)} free`)), bar,
    h(".key", null, swatch("floor", `weights ${size(weights)}`), swatch("time", `keys and values ${size(kv)}`),
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
