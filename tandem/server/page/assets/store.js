// Conversations and settings in this browser's storage: one entry per conversation, so that saving one is cheap.

const PREFIX = "tandem.chat.";

export const DEFAULTS = {
  system: "", temperature: 0.7, top_p: 0.95, max_tokens: 1024, seed: null, presence_penalty: 0, frequency_penalty: 0,
};

function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** False if the browser's storage is full. */
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = {
  load: () => ({ ...DEFAULTS, ...read("tandem.settings", {}) }),
  save: (values) => write("tandem.settings", values),
};

export const model = {
  load: () => localStorage.getItem("tandem.model") ?? "",
  save: (name) => localStorage.setItem("tandem.model", name),
};

/** All conversations without their messages, latest first. */
export function chats() {
  return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => read(key, null))
    .filter(Boolean).map(({ id, title, updated }) => ({ id, title, updated })).sort((a, b) => b.updated - a.updated);
}

export const load = (id) => read(PREFIX + id, null);
export const remove = (id) => localStorage.removeItem(PREFIX + id);

export function save(chat) {
  if (!chat.messages.length) return true;
  chat.title ||= chat.messages[0].content.trim().split("\n")[0].slice(0, 60) || "New chat";
  return write(PREFIX + chat.id, chat);
}

export function create() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), messages: [] };
}
