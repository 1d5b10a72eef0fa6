// The conversation view: messages, their branches, and the responses that are streaming.

import { complete } from "./api.js";
import { chip } from "./attachments.js";
import { grow } from "./composer.js";
import { $, copyText, h, icon, iconButton, say, toast } from "./dom.js";
import { toRequest } from "./files.js";
import { number, t } from "./i18n.js";
import { show } from "./markdown.js";
import * as mcp from "./mcp.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

const SAVE_EVERY = 700; // ms, while a response streams
const NEAR = 80; // px from the end within which the view scrolls with the text
const SHARE = 0.25; // of the time that rendering a growing response may take
const IDEAS = [t("Explain how a CPU cache works"), t("Write a haiku about rain"), t("A Python function that reverses words")];

export class Chat {
  constructor(host) {
    this.host = host; // { model(), settings(chat), opened(), changed(), working() }
    this.thread = $("thread");
    this.scroll = $("scroll");
    this.follow = true;
    this.jobs = new Map(); // conversation id -> { chat, message, stopper }: responses that are streaming
    this.chat = tree.create();
    this.scroll.addEventListener("scroll", () => this.scrolled());
    $("jump").addEventListener("click", () => { this.follow = true; this.toEnd(); });
    addEventListener("pagehide", () => {
      this.leaving = true;
      for (const { chat } of this.jobs.values()) store.save(chat);
    });
    addEventListener("pageshow", () => { this.leaving = false; });
  }

  get busy() { return this.jobs.has(this.chat.id); }

  /** Shows a conversation. The response of the one before goes on. */
  open(chat) {
    this.chat = this.jobs.get(chat.id)?.chat ?? chat;
    this.follow = true;
    this.draw();
    this.host.opened();
    this.host.working();
  }

  draw() {
    const nodes = tree.path(this.chat).map((at) => this.node(at));
    this.thread.replaceChildren(...(nodes.length ? nodes : [this.welcome()]));
    this.toEnd();
  }

  // ---- requests

  send(content, files = []) {
    tree.add(this.chat, this.chat.leaf, { role: "user", content, ...(files.length && { files }) });
    return this.respond(this.chat.leaf);
  }

  /** Generates a response to the message at `parent`. */
  respond(parent) {
    if (this.busy) return undefined;
    return this.run(this.chat, tree.add(this.chat, parent, { role: "assistant", content: "", model: this.host.model() }));
  }

  /** Streams the rest of a message, or all of it if it is empty. */
  async run(chat, message) {
    const stopper = new AbortController();
    for (const key of ["error", "stopped", "cut", "stats", "calls"]) delete message[key];
    message.partial = true; // a page that is reloaded now finds it so
    chat.updated = Date.now();
    this.jobs.set(chat.id, { chat, message, stopper });
    this.follow = true;
    this.draw();
    this.host.working();
    this.save(chat);
    try {
      await this.receive(chat, message, stopper.signal);
    } catch (error) {
      if (this.leaving) return; // the browser ended the request, and the message stays partial
      if (stopper.signal.aborted) message.stopped = true;
      else message.error = error instanceof TypeError ? t("The server cannot be reached: check that it is running.") : error.message;
      delete message.calls;
    }
    this.jobs.delete(chat.id);
    delete message.partial;
    this.save(chat);
    this.host.working();
    if (this.chat !== chat) return;
    this.replace(message);
    const asked = message.calls?.map(({ name }) => t("The model asks to call {name}.", { name })) ?? [];
    say(message.error ?? [message.content, ...asked].join(" "));
  }

  async receive(chat, message, signal) {
    const { system, ...sampling } = this.host.settings(chat);
    const messages = await toRequest(tree.path(chat, tree.indexOf(chat, message)).map((at) => chat.messages[at])
      .filter((m) => m.role === "user" || m.content || m.calls));
    if (system.trim()) messages.unshift({ role: "system", content: system });
    for (const key of Object.keys(sampling)) if (sampling[key] === null) delete sampling[key];
    const { tools, places } = await mcp.tools(toast, signal);
    const begun = performance.now(), asked = [];
    let saved = begun, first = null;
    const body = { model: message.model, messages, ...sampling, ...(tools.length && { tools }) };
    for await (const chunk of complete(body, signal)) {
      const delta = chunk.choices?.[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        first ??= performance.now() - begun;
        message.content += delta.content ?? "";
        if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
        this.refresh(chat, message);
      }
      for (const { index, id, function: { name, arguments: more = "" } } of delta.tool_calls ?? []) {
        first ??= performance.now() - begun;
        asked[index] ??= { id, name, arguments: "", ...places[name] };
        asked[index].arguments += more;
      }
      if (chunk.choices?.[0]?.finish_reason === "length") message.cut = true;
      if (chunk.usage) {
        const seconds = (performance.now() - begun - (first ?? 0)) / 1000, n = chunk.usage.completion_tokens;
        message.stats = { tokens: n, rate: n > 1 && seconds > 0 ? (n - 1) / seconds : null, first };
      }
      if (performance.now() - saved > SAVE_EVERY) {
        saved = performance.now();
        this.save(chat);
      }
    }
    if (asked.length && !message.cut) message.calls = asked.map(({ arguments: given, ...call }) => ({ ...call, arguments: given || "{}" }));
  }

  /** Makes a call of a message if the user allows it. When all of its calls are decided, the model gets the results. */
  async decide(chat, message, call, allowed) {
    if (this.jobs.has(chat.id)) return;
    if (!allowed) call.refused = true;
    else if (!await this.make(chat, message, call)) return;
    chat.updated = Date.now();
    await this.save(chat);
    if (message.calls.some((one) => !isDecided(one))) this.redraw(chat, message);
    else this.run(chat, tree.add(chat, tree.indexOf(chat, message), { role: "assistant", content: "", model: message.model }));
  }

  /** Makes a call, and returns whether it was made: the user may stop it. */
  async make(chat, message, call) {
    const stopper = new AbortController();
    this.jobs.set(chat.id, { chat, message, stopper });
    this.redraw(chat, message);
    this.host.working();
    try {
      Object.assign(call, await mcp.call(call, stopper.signal));
    } catch { /* it was stopped */ }
    this.jobs.delete(chat.id);
    this.host.working();
    if (!isDecided(call)) this.redraw(chat, message);
    return isDecided(call);
  }

  redraw(chat, message) {
    if (this.chat === chat) this.replace(message);
  }

  stop() { this.jobs.get(this.chat.id)?.stopper.abort(); }

  async save(chat) {
    try {
      await store.save(chat);
    } catch {
      toast(t("The browser's storage is full: delete some conversations to save new ones."));
    }
    this.host.changed();
  }

  // ---- rendering

  /** Renders new text at most once a frame, and for a quarter of the time. */
  refresh(chat, message) {
    if (this.frame || this.chat !== chat) return;
    const wait = (this.drawn ?? 0) + (this.cost ?? 0) / SHARE - performance.now();
    this.frame = wait > 0 ? setTimeout(() => this.render(chat, message), wait)
      : requestAnimationFrame(() => this.render(chat, message));
  }

  render(chat, message) {
    this.frame = 0;
    const node = this.thread.lastElementChild, begun = performance.now();
    if (this.chat !== chat || !node?.body || !message.partial) return;
    this.fill(node, message);
    if (this.follow) this.toEnd();
    this.drawn = performance.now();
    this.cost = this.drawn - begun;
  }

  replace(message) {
    const at = tree.indexOf(this.chat, message);
    this.thread.children[tree.path(this.chat).indexOf(at)]?.replaceWith(this.node(at));
    if (this.follow) this.toEnd();
  }

  node(at) {
    const message = this.chat.messages[at];
    return message.role === "user" ? this.userMessage(message, at) : this.assistantMessage(message, at);
  }

  userMessage(message, at) {
    const copy = iconButton("copy", t("Copy"), () => copyText(message.content, copy));
    const edit = iconButton("edit", t("Edit"), () => this.edit(node, message, at));
    const node = h("article.message.user", { "aria-label": t("You") },
      message.files && h(".files", null, message.files.map(chip)),
      message.content && h(".bubble", null, message.content),
      h(".actions", null, this.branches(at), copy, edit));
    return node;
  }

  assistantMessage(message, at) {
    const body = h(".text"), last = at === this.chat.leaf;
    const streaming = last && this.busy && message.partial;
    const node = h(`article.message.reply${streaming ? ".writing" : ""}`, { "aria-label": t("Response") });
    node.body = body;
    if (message.reasoning !== undefined || streaming) {
      node.reasoningText = h(".reasoning-text");
      node.reasoning = h("details.reasoning", { hidden: !message.reasoning }, h("summary", null, t("Reasoning")),
        node.reasoningText);
      node.append(node.reasoning);
    }
    node.append(body);
    this.fill(node, message);
    if (streaming) return node;
    for (const call of message.calls ?? []) node.append(this.callCard(message, call, last));
    if (message.error) node.append(h("p.error", { role: "alert" }, message.error));
    const copy = iconButton("copy", t("Copy"), () => copyText(message.content, copy));
    const again = iconButton("again", t("Regenerate"), () => this.respond(message.parent));
    const unfinished = last && message.content && (message.partial || message.stopped || message.cut || message.error);
    node.append(h(".actions", null, this.branches(at), copy, again,
      unfinished && iconButton("more", t("Continue"), () => !this.busy && this.run(this.chat, message)),
      h("span.stats", null, describe(message))));
    return node;
  }

  /** A tool call: what is called with what, buttons to decide, and its result. An import may have any `name`: `tool` is called. */
  callCard(message, call, last) {
    const { name, tool = name, url, arguments: given, result, failed, refused } = call, chat = this.chat;
    const decide = (text, kind, allowed) => h(`button.${kind}`, { type: "button", disabled: this.busy,
      onclick: () => this.decide(chat, message, call, allowed) }, text);
    const state = this.busy && !isDecided(call) ? t("running") : refused ? t("refused") : failed ? t("failed") : "";
    return h("section.call", { "aria-label": t("Call of {name}", { name: tool }) },
      h(".call-head", null, h("code", null, tool), url && h("span", null, mcp.nameOf(url)), state && h("span.state", null, state)),
      h("pre", { tabIndex: 0 }, indented(given)),
      result !== undefined && h("details", null, h("summary", null, t("Result")), h("pre", { tabIndex: 0 }, result)),
      last && !isDecided(call) && h(".call-actions", null, decide(t("Refuse"), "plain", false), decide(t("Allow"), "primary", true)));
  }

  /** "2/3" with arrows, for a message that has alternatives. */
  branches(at) {
    const all = tree.siblings(this.chat, at), now = all.indexOf(at);
    if (all.length < 2) return null;
    const go = (step) => {
      if (this.busy) return;
      tree.choose(this.chat, all[now + step]);
      this.save(this.chat);
      this.draw();
      const label = step < 0 ? t("Previous version") : t("Next version"); // the focus stays where it was
      this.thread.children[tree.path(this.chat).indexOf(all[now + step])].querySelector(`[aria-label="${label}"]`)?.focus();
    };
    const arrow = (name, label, step) => {
      const button = iconButton(name, label, () => go(step));
      button.setAttribute("aria-disabled", String(!all[now + step] && all[now + step] !== 0));
      return button;
    };
    return h("span.branches", { role: "group", "aria-label": t("Versions") },
      arrow("left", t("Previous version"), -1), `${now + 1}/${all.length}`, arrow("right", t("Next version"), 1));
  }

  fill(node, message) {
    if (node.reasoning && message.reasoning) {
      node.reasoning.hidden = false;
      node.reasoningText.textContent = message.reasoning;
    }
    show(node.body, message.content);
  }

  edit(node, message, at) {
    if (this.busy) this.stop();
    const area = h("textarea", { value: message.content, "aria-label": t("Edit message"), rows: 1 });
    const cancel = () => {
      const shown = this.userMessage(message, at);
      node.replaceWith(shown);
      shown.querySelector(`[aria-label="${t("Edit")}"]`).focus();
    };
    let files = message.files ?? [];
    const list = h("ul.files");
    const drawFiles = () => list.replaceChildren(...files.map((file) => h("li", null, chip(file),
      iconButton("close", t("Remove {name}", { name: file.name }), () => {
        files = files.filter((other) => other !== file);
        drawFiles();
        area.focus();
      }))));
    const send = () => {
      const text = area.value.trim();
      if ((!text && !files.length) || this.busy) return;
      const edited = tree.add(this.chat, message.parent, { role: "user", content: text, ...(files.length && { files }) });
      if (message.parent === null && this.chat.title === store.titleOf(message)) this.chat.title = store.titleOf(edited);
      this.respond(this.chat.leaf);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    area.addEventListener("input", () => grow(area));
    node.replaceChildren(h(".editor", null, list, area, h(".editor-actions", null,
      h("button.plain", { type: "button", onclick: cancel }, t("Cancel")),
      h("button.primary", { type: "button", onclick: send }, t("Send")))));
    drawFiles();
    grow(area);
    area.focus();
  }

  welcome() {
    const ideas = IDEAS.map((text) => h("button.idea", { type: "button", onclick: () => this.send(text) }, text));
    const mark = icon("mark");
    mark.classList.add("mark");
    return h(".welcome", null, mark, h("h1", null, t("How can I help?")),
      h("p", null, t("Everything you write stays on the machine this server runs on.")), h(".ideas", null, ideas));
  }

  // ---- scrolling

  toEnd() { this.scroll.scrollTop = this.scroll.scrollHeight; this.scrolled(); }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    this.follow = scrollHeight - scrollTop - clientHeight < NEAR;
    $("jump").hidden = this.follow;
  }
}

const isDecided = ({ result, refused }) => result !== undefined || refused === true;

/** JSON with a line for each value, or the text as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function describe({ stats, stopped, cut, partial }) {
  const parts = [];
  if (stopped) parts.push(t("stopped"));
  if (partial) parts.push(t("interrupted"));
  if (stats) {
    parts.push(t("{n} tokens", { n: number(stats.tokens) }));
    if (stats.rate) parts.push(t("{n} tokens/s", { n: number(stats.rate, stats.rate < 10 ? 1 : 0) }));
    if (stats.first) parts.push(t("first token after {n} s", { n: number(stats.first / 1000, 2) }));
  }
  if (cut) parts.push(t("cut at the maximum length: see settings"));
  return parts.join(" · ");
}
