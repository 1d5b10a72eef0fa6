// The page: the list of conversations, the message box, model, theme, and the choice of view.

import * as api from "./api.js";
import { Chat, grow } from "./chat.js";
import { $, h, iconButton, toast } from "./dom.js";
import { Live } from "./live.js";
import { Options } from "./options.js";
import * as store from "./store.js";

const input = $("input"), select = $("model");
const options = new Options();
const live = new Live($("live-view"), () => select.value, showRate);
const chat = new Chat({
  model: () => select.value,
  settings: () => options.values,
  changed: () => { keepAddress(); drawChats(); },
  working: showWorking,
});

// ---- conversations

function drawChats() {
  const shown = store.chats();
  $("chats").replaceChildren(...shown.map(({ id, title }) => h(`li${id === chat.chat.id ? ".current" : ""}`, null,
    h("button.title", { type: "button", title, onclick: () => go(id) }, title),
    iconButton("bin", `Delete ${title}`, () => forget(id), "quiet.bin"))));
}

function go(id) {
  location.hash = id ? `#${id}` : "#";
  menu(false);
}

function forget(id) {
  const kept = store.load(id);
  store.remove(id);
  if (chat.chat.id === id) go("");
  drawChats();
  toast("Conversation deleted.", "Undo", () => { store.save(kept); drawChats(); });
}

/** Puts a conversation's id in the URL once it has messages, so that a reload shows it again. */
function keepAddress() {
  const { id, messages } = chat.chat;
  if (messages.length && location.hash !== "#live") history.replaceState(null, "", `#${id}`);
}

/** Shows the view that the URL names: #live, #<conversation id>, or a new conversation. */
function route() {
  const name = location.hash.slice(1), isLive = name === "live";
  $("live-view").hidden = !isLive;
  $("chat-view").hidden = isLive;
  document.body.classList.toggle("is-live", isLive);
  live.show(isLive);
  if (!isLive && (name !== chat.chat.id || !name)) {
    const known = name ? store.load(name) : null;
    if (known || chat.chat.messages.length) chat.open(known ?? store.create());
    pick(known?.messages.findLast((message) => message.model)?.model);
  }
  drawChats();
  showWorking(chat.busy);
  if (!isLive && matchMedia("(hover: hover)").matches) input.focus();
}

// ---- the message box

function submit() {
  const text = input.value.trim();
  if (!text || chat.busy) return;
  input.value = "";
  resize();
  chat.send(text);
}

function resize() {
  grow(input);
  $("send").disabled = !input.value.trim();
}

function showWorking(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  live.watch(busy);
  if (!busy) resize();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("stop").addEventListener("click", () => chat.stop());
input.addEventListener("input", resize);
input.addEventListener("keydown", (event) => {
  const byTouch = matchMedia("(pointer: coarse)").matches; // on touch screens, Enter starts a new line
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !byTouch) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (chat.busy) chat.stop();
  else if (!$("settings").hidden) options.toggle(false);
});

// ---- models

async function loadModels() {
  try {
    const names = await api.models();
    select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    pick(store.model.load());
    if (!select.value && names.length) select.value = names[0];
    $("fine").textContent = "";
  } catch (error) {
    $("fine").textContent = error instanceof TypeError ? "The server cannot be reached: check that it is running." : error.message;
    setTimeout(loadModels, 3000);
  }
}

function pick(name) {
  if ([...select.options].some((option) => option.value === name)) select.value = name;
}

select.addEventListener("change", () => store.model.save(select.value));

// ---- live rate, theme, menu

function showRate(text, active) {
  $("rate-text").textContent = text;
  $("side-rate").textContent = active ? text : "";
  $("rate").classList.toggle("active", active);
}

const THEMES = { "": "System theme", light: "Light theme", dark: "Dark theme" };
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
addEventListener("storage", drawChats); // another tab
addEventListener("pagehide", () => store.save(chat.chat));

setTheme(document.documentElement.dataset.theme ?? "");
loadModels();
route();
resize();
