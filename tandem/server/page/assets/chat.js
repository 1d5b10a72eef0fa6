// The conversation view: messages, and the response that is streaming.

import { complete } from "./api.js";
import { $, copyText, h, icon, iconButton, toast } from "./dom.js";
import { show } from "./markdown.js";
import * as store from "./store.js";

const SAVE_EVERY = 700; // ms, while a response streams
const NEAR = 80; // px from the end within which the view scrolls with the text
const IDEAS = ["Explain how a CPU cache works", "Write a haiku about rain", "A Python function that reverses words"];

export class Chat {
  constructor(host) {
    this.host = host; // { model(), settings(), changed(), working(bool) }
    this.thread = $("thread");
    this.scroll = $("scroll");
    this.follow = true;
    this.open(store.create());
    this.scroll.addEventListener("scroll", () => this.scrolled());
    $("jump").addEventListener("click", () => { this.follow = true; this.toEnd(); });
  }

  get busy() { return Boolean(this.stopper); }

  open(chat) {
    this.stop();
    this.chat = chat;
    this.follow = true;
    this.draw();
  }

  draw() {
    const { messages } = this.chat;
    this.thread.replaceChildren(...(messages.length ? messages.map((m, i) => this.node(m, i)) : [this.welcome()]));
    this.toEnd();
  }

  // ---- requests

  send(text) {
    this.chat.messages.push({ role: "user", content: text });
    this.respond();
  }

  /** Generates a response to the first `count` messages. */
  async respond(count = this.chat.messages.length) {
    if (this.busy) return;
    const chat = this.chat, stopper = new AbortController();
    const message = { role: "assistant", content: "", model: this.host.model() };
    chat.messages.splice(count, Infinity, message);
    chat.updated = Date.now();
    this.stopper = stopper;
    this.follow = true;
    this.draw();
    this.save(chat);
    this.host.working(true);
    try {
      await this.receive(chat, message, stopper.signal);
    } catch (error) {
      if (stopper.signal.aborted) message.stopped = true;
      else message.error = error instanceof TypeError ? "The server cannot be reached: check that it is running." : error.message;
    }
    if (this.stopper === stopper) this.stopper = null;
    delete message.first;
    this.save(chat);
    this.host.working(this.busy);
    if (this.chat === chat) this.replace(message);
  }

  async receive(chat, message, signal) {
    const { system, ...sampling } = this.host.settings();
    const said = chat.messages.slice(0, -1).filter((m) => !m.error || m.content);
    const messages = said.map(({ role, content }) => ({ role, content }));
    if (system.trim()) messages.unshift({ role: "system", content: system });
    for (const key of Object.keys(sampling)) if (sampling[key] === null) delete sampling[key];
    const begun = performance.now();
    let saved = begun;
    for await (const chunk of complete({ model: message.model, messages, ...sampling }, signal)) {
      const delta = chunk.choices?.[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        message.first ??= performance.now() - begun;
        message.content += delta.content ?? "";
        if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
        this.refresh(chat, message);
      }
      if (chunk.choices?.[0]?.finish_reason === "length") message.cut = true;
      if (chunk.usage) {
        const seconds = (performance.now() - begun - (message.first ?? 0)) / 1000, n = chunk.usage.completion_tokens;
        message.stats = { tokens: n, rate: n > 1 && seconds > 0 ? (n - 1) / seconds : null, first: message.first };
      }
      if (performance.now() - saved > SAVE_EVERY) {
        saved = performance.now();
        this.save(chat);
      }
    }
  }

  stop() {
    this.stopper?.abort();
    this.stopper = null;
  }

  save(chat) {
    if (!store.save(chat)) toast("The browser's storage is full: delete some conversations to save new ones.");
    this.host.changed();
  }

  // ---- rendering

  /** Renders new text at most once a frame. */
  refresh(chat, message) {
    if (this.frame || this.chat !== chat) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const node = this.thread.lastElementChild;
      if (this.chat !== chat || !node?.body) return;
      this.fill(node, message);
      if (this.follow) this.toEnd();
    });
  }

  replace(message) {
    const at = this.chat.messages.indexOf(message);
    this.thread.children[at]?.replaceWith(this.node(message, at));
    if (this.follow) this.toEnd();
  }

  node(message, at) {
    return message.role === "user" ? this.userMessage(message, at) : this.assistantMessage(message, at);
  }

  userMessage(message, at) {
    const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
    const edit = iconButton("edit", "Edit", () => this.edit(node, message, at));
    const node = h("article.message.user", { "aria-label": "You" }, h(".bubble", null, message.content),
      h(".actions", null, copy, edit));
    return node;
  }

  assistantMessage(message, at) {
    const body = h(".text"), last = at === this.chat.messages.length - 1;
    const streaming = last && this.busy;
    const node = h(`article.message.reply${streaming ? ".writing" : ""}`, { "aria-label": "Response" });
    node.body = body;
    if (reasoningOf(message) !== undefined || streaming) {
      node.reasoningText = h(".reasoning-text");
      node.reasoning = h("details.reasoning", { hidden: !reasoningOf(message) }, h("summary", null, "Reasoning"),
        node.reasoningText);
      node.append(node.reasoning);
    }
    node.append(body);
    this.fill(node, message);
    if (streaming) return node;
    if (message.error) {
      node.append(h("p.error", { role: "alert" }, message.error));
    }
    const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
    const again = iconButton("again", "Regenerate", () => this.respond(at));
    node.append(h(".actions", null, copy, again, h("span.stats", null, describe(message))));
    return node;
  }

  fill(node, message) {
    if (node.reasoning && reasoningOf(message)) {
      node.reasoning.hidden = false;
      node.reasoningText.textContent = reasoningOf(message);
    }
    show(node.body, message.content);
  }

  edit(node, message, at) {
    if (this.busy) this.stop();
    const area = h("textarea", { value: message.content, "aria-label": "Edit message", rows: 1 });
    const cancel = () => node.replaceWith(this.userMessage(message, at));
    const send = () => {
      const text = area.value.trim();
      if (!text) return;
      message.content = text;
      this.chat.title = at === 0 ? "" : this.chat.title;
      this.respond(at + 1);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    area.addEventListener("input", () => grow(area));
    node.replaceChildren(h(".editor", null, area, h(".editor-actions", null,
      h("button.plain", { type: "button", onclick: cancel }, "Cancel"),
      h("button.primary", { type: "button", onclick: send }, "Send"))));
    grow(area);
    area.focus();
  }

  welcome() {
    const ideas = IDEAS.map((text) => h("button.idea", { type: "button", onclick: () => this.send(text) }, text));
    const mark = icon("mark");
    mark.classList.add("mark");
    return h(".welcome", null, mark, h("h1", null, "How can I help?"),
      h("p", null, "Everything you write stays on the machine this server runs on."), h(".ideas", null, ideas));
  }

  // ---- scrolling

  toEnd() { this.scroll.scrollTop = this.scroll.scrollHeight; this.scrolled(); }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    this.follow = scrollHeight - scrollTop - clientHeight < NEAR;
    $("jump").hidden = this.follow;
  }
}

const reasoningOf = (message) => message.reasoning ?? message.thought; // `thought`: saved by older versions

export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function describe({ stats, stopped, cut }) {
  const parts = [];
  if (stopped) parts.push("stopped");
  if (stats) {
    parts.push(`${stats.tokens} tokens`);
    if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`);
    if (stats.first) parts.push(`first token after ${(stats.first / 1000).toFixed(2)} s`);
  }
  if (cut) parts.push("cut at the maximum length: see settings");
  return parts.join(" · ");
}
