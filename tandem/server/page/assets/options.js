// The settings panel: system prompt and sampling parameters of the conversation that is shown, presets, and the language.

import { $, ask, h, iconButton, toast } from "./dom.js";
import { LANGUAGES, language, setLanguage, t } from "./i18n.js";
import * as mcp from "./mcp.js";
import { DEFAULTS, known, read, write } from "./store.js";

const SLIDERS = [
  ["temperature", t("Temperature"), 0, 2, 0.05, t("0 is greedy: always the most likely token. Higher is more varied.")],
  ["top_p", t("Top p"), 0.05, 1, 0.05, t("Sample from the most likely tokens with this total probability.")],
  ["presence_penalty", t("Presence penalty"), -2, 2, 0.1, t("Above 0, tokens that have occurred are less likely.")],
  ["frequency_penalty", t("Frequency penalty"), -2, 2, 0.1, t("Above 0, tokens are less likely the more often they occurred.")],
];
const NUMBERS = [
  ["top_k", t("Top k"), t("off"), 0, 1],
  ["min_p", t("Min p"), t("off"), 0, 0.01],
  ["repeat_penalty", t("Repeat penalty"), t("off"), 0.01, 0.05],
  ["max_tokens", t("Maximum tokens"), t("tokens"), 1, 1],
  ["seed", t("Seed"), t("random"), 0, 1],
];
const EFFORTS = [["", t("as the model does")], ["none", t("off")], ["low", t("low")], ["medium", t("medium")], ["high", t("high")]];
const STANDARD = "tandem.settings", PRESETS = "tandem.presets"; // of new conversations; by name

export class Options {
  constructor(host) {
    this.host = host; // { chat(), save() }
    $("open-settings").addEventListener("click", () => this.toggle($("settings").hidden));
    $("settings-close").addEventListener("click", () => { this.toggle(false); $("open-settings").focus(); });
  }

  /** The settings of a conversation: its own, and the standard ones for the rest. */
  of(chat) {
    return { ...DEFAULTS, ...known(read(STANDARD, {})), ...known(chat.settings) };
  }

  toggle(open) {
    $("settings").hidden = !open;
    document.body.classList.toggle("settings-open", open);
    if (open) this.draw();
    if (open && matchMedia("(min-width: 1100px)").matches) $("system").focus();
  }

  set(key, value) {
    const chat = this.host.chat();
    chat.settings = { ...this.of(chat), [key]: value };
    this.host.save();
  }

  draw() {
    if ($("settings").hidden) return;
    const values = this.of(this.host.chat());
    const system = h("textarea", { id: "system", rows: 5, value: values.system,
      placeholder: t("Instructions for this conversation"), oninput: () => this.set("system", system.value) });
    $("fields").replaceChildren(
      this.presets(),
      h("label.field", null, h("span.name", null, t("System prompt")), system),
      ...SLIDERS.map((slider) => this.slider(values, ...slider)),
      ...NUMBERS.map((number) => this.number(values, ...number)),
      this.choice("reasoning_effort", t("Reasoning"), EFFORTS, values.reasoning_effort ?? "",
        (value) => this.set("reasoning_effort", value || null)),
      this.toolServers(),
      this.choice("language", t("Language"), Object.entries(LANGUAGES), language, setLanguage),
    );
  }

  // ---- presets

  presets() {
    const all = read(PRESETS, {}), chat = this.host.chat(), chosen = Object.hasOwn(all, chat.preset) ? chat.preset : "";
    const use = (name) => {
      chat.preset = name;
      chat.settings = name ? { ...DEFAULTS, ...known(read(PRESETS, {})[name]) } : undefined;
      this.host.save();
      this.draw();
      $("preset").focus();
    };
    const keep = (name) => {
      if (name) write(PRESETS, { ...all, [name]: this.of(chat) });
      else write(STANDARD, this.of(chat));
      toast(t("Preset saved."));
      use(name);
    };
    const saveAs = async () => {
      const name = (await ask(t("Name of the preset"), ""))?.slice(0, 60);
      if (name) keep(name);
    };
    const remove = () => {
      const { [chosen]: _, ...rest } = all;
      write(PRESETS, rest);
      chat.preset = "";
      this.host.save();
      this.draw();
      $("preset").focus();
    };
    const button = (name, onclick) => h("button.plain", { type: "button", onclick }, name);
    return h(".presets", null,
      this.choice("preset", t("Preset"), [["", t("Standard")], ...Object.keys(all).map((name) => [name, name])], chosen, use),
      h(".preset-actions", null, button(t("Save"), () => keep(chosen)), button(t("Save as"), saveAs),
        chosen ? button(t("Delete"), remove) : button(t("Reset"), () => { write(STANDARD, {}); use(""); })));
  }

  // ---- MCP servers, of all conversations

  toolServers() {
    const list = h("ul.tool-servers"), url = h("input", { type: "url", id: "mcp-url", required: true, placeholder: "https://example.org/mcp",
      "aria-label": t("Address of an MCP server") });
    const token = h("input", { type: "password", placeholder: t("Token, if it needs one"), "aria-label": t("Token, if it needs one"),
      autocomplete: "off" });
    const draw = async () => list.replaceChildren(...(await mcp.servers()).map((server) => this.toolServer(server, draw)));
    const add = (event) => {
      event.preventDefault();
      mcp.keepServer(new URL(url.value).href, { token: token.value.trim(), on: true });
      url.value = token.value = "";
      draw();
    };
    draw();
    return h("section.field", { "aria-label": t("Tools") }, h("span.name", null, t("Tools")),
      h("small", null, t("Tools of MCP servers, for all conversations. The model asks before each call, and you allow it or not.")), list,
      h("form.tool-form", { onsubmit: add }, url, token, h("button.plain", { type: "submit" }, t("Add"))));
  }

  toolServer(server, draw) {
    const name = mcp.nameOf(server.url), state = h("small", { role: "status" });
    const check = h("input", { type: "checkbox", checked: server.on, onchange: () => {
      mcp.keepServer(server.url, { on: check.checked });
      show();
    } });
    const show = async () => {
      state.textContent = "";
      if (!check.checked) return;
      try {
        state.textContent = (await mcp.toolsOf(server)).map((tool) => tool.name).join(", ") || t("It has no tools.");
      } catch (error) {
        state.textContent = error.message;
      }
    };
    show();
    return h("li", null, h("label", null, check, h("span", null, name)), !server.own
      && iconButton("close", t("Remove {name}", { name }), () => { mcp.removeServer(server); draw(); $("mcp-url").focus(); }), state);
  }

  // ---- fields

  choice(id, name, all, value, use) {
    const select = h("select", { id, onchange: () => use(select.value) }, all.map(([key, text]) => h("option", { value: key }, text)));
    select.value = value;
    return h("label.field.inline", null, h("span.name", null, name), select);
  }

  slider(values, key, name, min, max, step, help) {
    const shown = h("output", null, String(values[key]));
    const input = h("input", { type: "range", id: key, min, max, step, "aria-describedby": `${key}-help`, oninput: () => {
      this.set(key, Number(input.value));
      shown.textContent = input.value;
    } });
    input.value = values[key];
    return h("label.field", null, h("span.name", null, name, shown), input, h("small", { id: `${key}-help` }, help));
  }

  number(values, key, name, placeholder, min, step) {
    const input = h("input", { type: "number", id: key, min, step, placeholder, value: values[key] ?? "",
      oninput: () => {
        const value = input.value === "" ? NaN : Number(input.value);
        this.set(key, value >= min && (step < 1 || Number.isInteger(value)) ? value : DEFAULTS[key]);
      } });
    return h("label.field.inline", null, h("span.name", null, name), input);
  }
}
