// Conversations as files: JSON has everything, Markdown the messages that are shown.

import { fenced, fromDataURL, toDataURL } from "./files.js";
import { t } from "./i18n.js";
import * as store from "./store.js";
import { add, create, path, upgrade } from "./tree.js";

const MARK = /^<!-- tandem: (system|user|assistant|file)(?: (\S+))? -->$/; // begins a part of a Markdown file
const ESCAPED = /^(\\*)<!-- tandem:/gm, UNESCAPED = /^\\(\\*<!-- tandem:)/gm;

// ---- out

/** Offers a file to save. */
function offer(name, ending, type, content) {
  const link = Object.assign(document.createElement("a"), {
    href: URL.createObjectURL(new Blob([content], { type })),
    download: `${name.replace(/[^\p{L}\p{N}._-]+/gu, " ").trim() || "chat"}.${ending}`,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const withData = async (chat) => ({ ...chat, messages: await Promise.all(chat.messages.map(async (message) => ({ ...message,
  ...(message.files && { files: await Promise.all(message.files.map(async ({ blob, ...file }) =>
    (blob ? { ...file, data: await toDataURL(blob) } : file))) }) }))) });

export async function saveJSON(chats, name) {
  const text = JSON.stringify({ tandem: 1, chats: await Promise.all(chats.map(withData)) }, null, 1);
  offer(name, "json", "application/json", text);
}

export async function saveMarkdown(chat) {
  offer(chat.title, "md", "text/markdown", await toMarkdown(chat));
}

export async function toMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  const put = (mark, heading, text) => parts.push(`<!-- tandem: ${mark} -->`, `### ${heading}`, text.replace(ESCAPED, "\\$&"));
  if (chat.settings?.system) put("system", t("System prompt"), chat.settings.system);
  for (const { role, content, model, files, calls = [] } of path(chat).map((at) => chat.messages[at])) {
    const asked = calls.map((call) => `\`${call.name}\`\n\n${fenced(call.arguments)}\n\n${fenced(call.result ?? "")}`);
    if (role === "user") put("user", t("You"), content);
    else put(model ? `assistant ${encodeURIComponent(model)}` : "assistant", model ?? t("Response"), [content, ...asked].join("\n\n"));
    for (const { name, text, blob } of files ?? []) {
      put(`file ${encodeURIComponent(name)}`, name, blob ? `![${name.replace(/[[\]]/g, "")}](${await toDataURL(blob)})` : fenced(text));
    }
  }
  return `${parts.join("\n\n")}\n`;
}

// ---- in

/** Saves the conversations of a file, and returns them. */
export async function load(file) {
  const text = await file.text();
  let chats;
  try {
    chats = /\.(md|markdown)$/i.test(file.name) ? [fromMarkdown(text)] : fromJSON(JSON.parse(text));
  } catch {
    chats = [];
  }
  const known = new Set((await store.titles()).map(({ id }) => id)), loaded = [];
  for (const found of chats.map(upgrade).filter((chat) => chat?.messages.length)) {
    const chat = { ...found, ...(known.has(found.id) && { id: create().id }) };
    known.add(chat.id);
    await store.save(chat);
    loaded.push(chat);
  }
  if (!loaded.length) throw new Error(t("{name} has no conversations: choose a file that was exported here.", { name: file.name }));
  return loaded;
}

/** Also takes `{"messages": [...]}` in OpenAI's form. */
function fromJSON(value) {
  return (value.chats ?? [value]).map(({ messages, ...chat }) => {
    const system = messages.filter(({ role }) => role === "system").map(({ content }) => content).join("\n\n");
    return { ...chat, ...(system && { settings: { ...chat.settings, system } }), messages: messages
      .filter(({ role }) => role !== "system").map(({ files, ...message }) => ({ ...message, files: [files ?? []].flat().map(
        (file) => (typeof file?.data === "string" ? { name: file.name, blob: fromDataURL(file.data) } : file)) })) };
  });
}

function fromMarkdown(text) {
  const chat = create(), parts = [];
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const mark = MARK.exec(line);
    if (mark) parts.push({ kind: mark[1], name: decodeURIComponent(mark[2] ?? ""), lines: [] });
    else if (parts.length) parts.at(-1).lines.push(line);
    else chat.title ||= line.replace(/^#\s*/, "");
  }
  for (const { kind, name, lines } of parts) {
    const content = lines.join("\n").replace(/^\s*### .*\n\n?/, "").replace(/\n+$/, "").replace(UNESCAPED, "$1");
    if (kind === "system") chat.settings = { system: content };
    else if (kind === "file") (chat.messages.at(-1).files ??= []).push(fileOf(name, content));
    else add(chat, chat.leaf, { role: kind, content, ...(kind === "assistant" && name && { model: name }) });
  }
  return chat;
}

function fileOf(name, content) {
  const image = /^!\[[^\]]*\]\((data:image\/[\w+.-]+;base64,[A-Za-z0-9+/=]*)\)$/.exec(content);
  if (image) return { name, blob: fromDataURL(image[1]) };
  return { name, text: content.replace(/^`{3,}\n/, "").replace(/\n`{3,}$/, "") };
}
