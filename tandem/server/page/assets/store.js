// What this browser keeps: conversations in IndexedDB, settings in localStorage.

import { t } from "./i18n.js";
import { upgrade } from "./tree.js";

export const DEFAULTS = {
  system: "", temperature: 0.7, top_p: 0.95, max_tokens: 1024, seed: null, presence_penalty: 0, frequency_penalty: 0,
  top_k: null, min_p: null, repeat_penalty: null, reasoning_effort: null,
};

/** The settings that are known and of the right type: files and storage may have others. */
export function known(values) {
  const right = (key, value) => (typeof DEFAULTS[key] === "string" ? typeof value === "string"
    : value === null || (key === "reasoning_effort" ? typeof value === "string" : Number.isFinite(value)));
  return Object.fromEntries(Object.entries(values ?? {}).filter(([key, value]) => Object.hasOwn(DEFAULTS, key) && right(key, value)));
}

// ---- localStorage

export function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch { /* full: settings are lost with the page */ }
}

export const model = {
  load: () => localStorage.getItem("tandem.model") ?? "",
  save: (name) => localStorage.setItem("tandem.model", name),
};

// ---- conversations: whole ones in `chats`, and what the list shows of them in `titles`

const CHATS = "chats", TITLES = "titles";
const tabs = new BroadcastChannel("tandem");

const opened = new Promise((resolve, reject) => {
  const opening = indexedDB.open("tandem", 1);
  opening.onupgradeneeded = () => {
    for (const name of [CHATS, TITLES]) opening.result.createObjectStore(name, { keyPath: "id" });
  };
  opening.onsuccess = () => resolve(opening.result);
  opening.onerror = () => reject(opening.error);
});

/** Runs `use` on object stores in one transaction; resolves with the result of the request that it returns. */
async function transact(names, mode, use) {
  const transaction = (await opened).transaction(names, mode);
  return new Promise((resolve, reject) => {
    const request = use(...names.map((name) => transaction.objectStore(name)));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
    if (mode === "readwrite") transaction.commit(); // also if the page is about to go
  });
}

/** Id, title and time of all conversations, latest first. */
export async function titles() {
  return (await transact([TITLES], "readonly", (all) => all.getAll())).sort((a, b) => b.updated - a.updated);
}

export const load = (id) => transact([CHATS], "readonly", (chats) => chats.get(id));

export async function remove(id) {
  await transact([CHATS, TITLES], "readwrite", (chats, all) => { chats.delete(id); all.delete(id); });
  tabs.postMessage(id);
}

export const titleOf = ({ content, files }) => (content.trim().split("\n")[0] || (files?.[0].name ?? "")).slice(0, 60);

/** Saves a conversation that has messages. Fails if the browser's storage is full. */
export async function save(chat) {
  if (!chat.messages.length) return;
  chat.title ||= titleOf(chat.messages[0]) || t("New chat");
  await transact([CHATS, TITLES], "readwrite", (chats, all) => {
    chats.put(chat);
    all.put({ id: chat.id, title: chat.title, updated: chat.updated });
  });
  tabs.postMessage(chat.id);
}

/** Calls `use` with each conversation. */
export async function each(use) {
  await transact([CHATS], "readonly", (chats) => {
    const cursor = chats.openCursor();
    cursor.onsuccess = () => {
      if (!cursor.result) return;
      use(cursor.result.value);
      cursor.result.continue();
    };
  });
}

/** The conversations whose title or messages have all words, with the line around the first of them. */
export async function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean), found = [];
  await each((chat) => {
    const lines = chat.messages.map((message) => message.content).join("\n").split("\n");
    const whole = `${chat.title}\n${lines.join("\n")}`.toLowerCase();
    if (!words.every((word) => whole.includes(word))) return;
    const line = lines.find((each) => each.toLowerCase().includes(words[0])) ?? "";
    const at = line.toLowerCase().indexOf(words[0]), cut = at > 40 ? at - 20 : 0;
    found.push({ id: chat.id, title: chat.title, updated: chat.updated, line: (cut ? "…" : "") + line.slice(cut, cut + 120) });
  });
  return found.sort((a, b) => b.updated - a.updated);
}

/** Calls `use` when another tab has changed a conversation. */
export function onChange(use) {
  tabs.addEventListener("message", (event) => use(event.data));
}

/** Moves the conversations that older versions kept in localStorage. */
export async function moveOld() {
  for (const key of Object.keys(localStorage).filter((each) => each.startsWith("tandem.chat."))) {
    const chat = upgrade(read(key, null));
    if (chat) await save(chat);
    localStorage.removeItem(key);
  }
}
