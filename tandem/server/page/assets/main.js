// The page: the list of conversations, the message box, model, theme, and the choice of view.

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { $, ask, h, iconButton, toast } from "./dom.js";
import { t, translatePage } from "./i18n.js";
import { Live } from "./live.js";
import { Options } from "./options.js";
import * as store from "./store.js";
import * as transfer from "./transfer.js";
import * as tree from "./tree.js";

translatePage();
const select = $("model");
const options = new Options({ chat: () => chat.chat, save: () => chat.save(chat.chat) });
const live = new Live($("live-view"), () => select.value, showRate);
const chat = new Chat({
  model: () => select.value,
  settings: (of) => options.of(of),
  opened: () => options.draw(),
  changed: () => { keepAddress(); drawChats(); },
  working: showWorking,
});
const composer = new Composer({ send: (text, files) => chat.send(text, files), busy: () => chat.busy, changed: () => warn() });

// ---- conversations

let listed = ""; // what the list shows
async function drawChats() {
  const text = $("search").value.trim();
  const shown = text ? await store.search(text) : await store.titles();
  const now = JSON.stringify([shown.map(({ id, title, line }) => [id, title, line]), chat.chat.id, [...chat.jobs.keys()]]);
  if (now === listed || text !== $("search").value.trim()) return;
  listed = now;
  $("chats").replaceChildren(...shown.map(({ id, title, line }) => h(`li${id === chat.chat.id ? ".current" : ""}`, null,
    h("button.title", { type: "button", title, "aria-current": id === chat.chat.id ? "page" : undefined, onclick: () => go(id) },
      chat.jobs.has(id) && h("span.dot.active"), title, line && h("small", null, line)),
    iconButton("bin", t("Delete {title}", { title }), () => forget(id), "quiet.bin"))));
  if (!shown.length && text) $("chats").append(h("li.note", null, t("Nothing found.")));
}

function go(id) {
  history.pushState(null, "", id ? `#${id}` : location.pathname);
  route();
  menu(false);
}

async function forget(id) {
  const kept = await store.load(id);
  await store.remove(id);
  if (chat.chat.id === id) {
    chat.stop();
    go("");
  }
  drawChats();
  $("new").focus();
  toast(t("Conversation deleted."), t("Undo"), async () => { await store.save(kept); drawChats(); });
}

/** Puts the id of a new conversation in the URL once it has messages, so that a reload shows it again. */
function keepAddress() {
  const { id, messages } = chat.chat;
  if (messages.length && location.hash.length < 2) history.replaceState(null, "", `#${id}`);
}

/** Shows the view that the URL names: #live, #<conversation id>, or a new conversation. */
async function route() {
  const name = location.hash.slice(1), isLive = name === "live";
  $("live-view").hidden = !isLive;
  $("chat-view").hidden = isLive;
  document.body.classList.toggle("is-live", isLive);
  live.show(isLive);
  if (!isLive && (name !== chat.chat.id || !name)) {
    const known = name ? await store.load(name) : null;
    if (name !== location.hash.slice(1)) return; // meanwhile another one was chosen
    if (name && !known) history.replaceState(null, "", location.pathname); // it was deleted
    if (known || chat.chat.messages.length) chat.open(known ?? tree.create());
    else chat.draw();
    pick(known?.messages.findLast((message) => message.model)?.model);
  }
  drawChats();
  showWorking();
  if (!isLive && matchMedia("(hover: hover)").matches) composer.input.focus();
}

$("search").addEventListener("input", drawChats);
store.onChange((id) => {
  drawChats();
  if (id === chat.chat.id && !chat.busy) store.load(id).then((known) => known && !chat.busy && chat.open(known));
});

// ---- the menu of a conversation

const ACTIONS = [
  [t("Rename"), true, async () => {
    const title = await ask(t("Name of this conversation"), chat.chat.title);
    if (title) chat.save(Object.assign(chat.chat, { title: title.slice(0, 200) }));
  }],
  [t("Export as Markdown"), true, () => transfer.saveMarkdown(chat.chat)],
  [t("Export as JSON"), true, () => transfer.saveJSON([chat.chat], chat.chat.title)],
  [t("Export all conversations"), false, async () => {
    const all = [];
    await store.each((one) => all.push(one));
    transfer.saveJSON(all, "tandem");
  }],
  [t("Import"), false, () => $("import").click()],
];

$("menu").append(...ACTIONS.map(([name, needsChat, act]) => h("button.row", { type: "button", "data-needs-chat": needsChat,
  onclick: () => { $("menu").hidePopover(); act(); } }, name)));
$("menu").addEventListener("toggle", () => {
  for (const item of $("menu").children) {
    item.disabled = item.dataset.needsChat === "true" && (!chat.chat.messages.length || location.hash === "#live");
  }
});
$("import").addEventListener("change", async () => {
  for (const file of $("import").files) {
    try {
      const loaded = await transfer.load(file);
      go(loaded[0].id);
      toast(t("Conversations imported: {n}", { n: loaded.length }));
    } catch (error) {
      toast(error.message);
    }
  }
  $("import").value = "";
  drawChats();
});

// ---- the message box

function showWorking() {
  const { busy } = chat;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  live.watch(chat.jobs.size > 0);
  drawChats();
}

$("stop").addEventListener("click", () => chat.stop());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (chat.busy) chat.stop();
  else if (!$("settings").hidden) options.toggle(false);
});

// ---- models

let unreachable = "", warned = "";
async function loadModels() {
  try {
    const names = await api.models();
    select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    pick(store.model.load());
    if (!select.value && names.length) select.value = names[0];
    unreachable = "";
    warn();
  } catch (error) {
    unreachable = error instanceof TypeError ? t("The server cannot be reached: check that it is running.") : error.message;
    warn();
    setTimeout(loadModels, 3000);
  }
}

/** Says below the message box what is wrong before a message is sent. */
async function warn() {
  const images = composer.files.some(({ blob }) => blob), name = select.value;
  const now = JSON.stringify([unreachable, images, name]);
  if (now === warned) return;
  warned = now;
  const state = images && !unreachable ? (await api.get("/live").catch(() => null))?.models[name] : null;
  if (now !== warned) return;
  $("fine").textContent = unreachable || (state?.vision === false ? t("{name} cannot see images.", { name }) : "");
}

function pick(name) {
  if ([...select.options].some((option) => option.value === name)) select.value = name;
}

select.addEventListener("change", () => { store.model.save(select.value); warn(); });

// ---- live rate, theme, menu

function showRate(text, active) {
  $("rate-text").textContent = text;
  $("side-rate").textContent = active ? text : "";
  $("rate").classList.toggle("active", active);
}

const THEMES = { "": t("System theme"), light: t("Light theme"), dark: t("Dark theme") };
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  if (theme) localStorage.setItem("tandem.theme", theme);
  else localStorage.removeItem("tandem.theme");
  $("theme-name").textContent = THEMES[theme];
  live.redraw();
}
const menu = (open) => document.body.classList.toggle("menu-open", open);

$("theme").addEventListener("click", () => {
  const order = Object.keys(THEMES), now = document.documentElement.dataset.theme ?? "";
  setTheme(order[(order.indexOf(now) + 1) % order.length]);
});
$("new").addEventListener("click", () => go(""));
$("open-live").addEventListener("click", () => go("live"));
$("rate").addEventListener("click", () => go(location.hash === "#live" ? chat.chat.messages.length && chat.chat.id : "live"));
$("side-open").addEventListener("click", () => menu(true));
$("side-close").addEventListener("click", () => menu(false));
$("veil").addEventListener("click", () => { menu(false); options.toggle(false); });
addEventListener("hashchange", route);

setTheme(document.documentElement.dataset.theme ?? "");
navigator.serviceWorker?.register("/page/service-worker.js", { scope: "/" }).catch(() => {}); // not on plain http elsewhere
loadModels();
await store.moveOld();
route();
composer.update();
