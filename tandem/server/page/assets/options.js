// The settings panel: system prompt and sampling parameters.

import { $, h } from "./dom.js";
import { t } from "./i18n.js";
import { DEFAULTS, settings as kept } from "./store.js";

const SLIDERS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 is greedy: always the most likely token. Higher is more varied."],
  ["top_p", "Top p", 0.05, 1, 0.05, "Sample from the most likely tokens with this total probability."],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "Above 0, tokens that have occurred are less likely."],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Above 0, tokens are less likely the more often they occurred."],
];

export class Options {
  constructor() {
    this.values = kept.load();
    $("open-settings").addEventListener("click", () => this.toggle($("settings").hidden));
    $("settings-close").addEventListener("click", () => this.toggle(false));
    this.draw();
  }

  toggle(open) {
    $("settings").hidden = !open;
    document.body.classList.toggle("settings-open", open);
    if (open && matchMedia("(min-width: 1100px)").matches) $("system").focus();
  }

  set(key, value) {
    this.values[key] = value;
    kept.save(this.values);
  }

  draw() {
    const system = h("textarea", { id: "system", rows: 5, value: this.values.system,
      placeholder: "Instructions for every conversation",
      oninput: () => this.set("system", system.value) });
    const reset = h("button.plain", { type: "button", onclick: () => {
      this.values = { ...DEFAULTS };
      kept.save(this.values);
      this.draw();
    } }, "Reset");
    $("fields").replaceChildren(
      h("label.field", null, h("span.name", null, "System prompt"), system),
      ...SLIDERS.map((slider) => this.slider(...slider)),
      this.number("max_tokens", "Maximum tokens", "tokens", 1),
      this.number("seed", "Seed", "random", 0),
      reset,
    );
  }

  slider(key, name, min, max, step, help) {
    const shown = h("output", null, String(this.values[key]));
    const input = h("input", { type: "range", id: key, min, max, step, title: help, oninput: () => {
      this.set(key, Number(input.value));
      shown.textContent = input.value;
    } });
    input.value = this.values[key];
    return h("label.field", null, h("span.name", null, name, shown), input, h("small", null, help));
  }

  number(key, name, placeholder, min) {
    const input = h("input", { type: "number", id: key, min, step: 1, placeholder, value: this.values[key] ?? "",
      oninput: () => {
        const value = parseInt(input.value, 10);
        this.set(key, Number.isFinite(value) && value >= min ? value : DEFAULTS[key]);
      } });
    return h("label.field.inline", null, h("span.name", null, name), input);
  }
}
