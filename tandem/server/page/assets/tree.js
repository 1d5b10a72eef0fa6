// A conversation is a tree: an edited message and a regenerated response are siblings of the earlier one. `messages` only
// grows; a message names its parent by its place in it, and `leaf` is the place of the last message that is shown.

import { known } from "./store.js";

export function create() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), messages: [], leaf: null };
}

/** Adds a message behind `parent`, and shows it. */
export function add(chat, parent, message) {
  message.parent = parent;
  chat.leaf = chat.messages.push(message) - 1;
  return message;
}

export const indexOf = (chat, message) => chat.messages.indexOf(message);

/** The places of the messages that are shown, first to last. */
export function path(chat, leaf = chat.leaf) {
  const found = [];
  for (let at = leaf; at !== null && at !== undefined; at = chat.messages[at].parent) found.unshift(at);
  return found;
}

/** The places of a message and of its alternatives. */
export function siblings(chat, at) {
  const { parent } = chat.messages[at];
  return [...chat.messages.keys()].filter((other) => chat.messages[other].parent === parent);
}

/** Shows the newest branch that has this message. */
export function choose(chat, at) {
  for (let next = at; next >= 0; next = chat.messages.findLastIndex((message) => message.parent === chat.leaf)) {
    chat.leaf = next;
  }
}

const PARTS = { role: "string", content: "string", model: "string", reasoning: "string", error: "string",
  partial: "boolean", stopped: "boolean", cut: "boolean" };

const CALL = { id: "string", name: "string", arguments: "string", url: "string", tool: "string", result: "string",
  refused: "boolean", failed: "boolean" };

/** The known parts of a tool call, or null if it is none. */
function rightCall(call) {
  const right = Object.fromEntries(Object.entries(CALL).filter(([name, type]) => typeof call?.[name] === type)
    .map(([name]) => [name, call[name]]));
  return right.id !== undefined && right.name !== undefined && right.arguments !== undefined ? right : null;
}

/** The parts of a message that are known and of the right type: others would stop the page when it is shown. */
function rightParts({ files, stats, calls, ...message }) {
  const { thought: reasoning } = message; // saved by older versions
  const parts = { reasoning, ...message };
  const right = Object.fromEntries(Object.entries(PARTS).filter(([name, type]) => typeof parts[name] === type)
    .map(([name]) => [name, parts[name]]));
  const kept = (Array.isArray(files) ? files : []).filter((file) => typeof file?.name === "string"
    && (file.blob instanceof Blob || typeof file.text === "string"))
    .map(({ name, blob, text }) => (blob instanceof Blob ? { name, blob } : { name, text }));
  const asked = (Array.isArray(calls) ? calls : []).map(rightCall).filter(Boolean);
  const counts = Object.values(stats ?? {}).every((value) => value === null || Number.isFinite(value));
  return { ...right, ...(kept.length && { files: kept }), ...(asked.length && { calls: asked }), ...(Number.isFinite(stats?.tokens) && counts && { stats }) };
}

/** A conversation from a file or an older version as a tree, with what is wrong in it left out; null if there is none. */
export function upgrade(chat) {
  if (!Array.isArray(chat?.messages)) return null;
  const linear = chat.leaf === undefined, messages = [];
  for (const [at, message] of chat.messages.entries()) {
    const parent = linear ? at - 1 : message?.parent ?? -1;
    if (!["user", "assistant"].includes(message?.role) || typeof message.content !== "string") return null;
    if (!Number.isInteger(parent) || parent >= at || parent < -1) return null;
    messages.push({ ...rightParts(message), parent: parent < 0 ? null : parent });
  }
  const leaf = Number.isInteger(chat.leaf) && messages[chat.leaf] ? chat.leaf : messages.length ? messages.length - 1 : null;
  const updated = Number.isFinite(chat.updated) ? chat.updated : Date.now();
  return { ...create(), ...(typeof chat.id === "string" && /^(?!live$)[\w-]{1,64}$/.test(chat.id) && { id: chat.id }),
    title: typeof chat.title === "string" ? chat.title.slice(0, 200) : "", updated, messages, leaf,
    ...(chat.settings && { settings: known(chat.settings) }),
    ...(typeof chat.preset === "string" && { preset: chat.preset }) };
}
