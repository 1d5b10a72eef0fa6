// Creates DOM nodes. Text is always set as text: nothing that a model or a user writes is parsed as HTML.

import { t } from "./i18n.js";

export const $ = (id) => document.getElementById(id);

/** h("a.link", { href }, "text", node): an element with its classes, properties or listeners, and children. */
export function h(name, props, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.startsWith("aria-") || key.startsWith("data-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick, kind = "quiet") {
  return h(`button.${kind}`, { type: "button", title: label, "aria-label": label, onclick }, icon(name));
}

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers have no clipboard API on plain http from another machine: copy a selection instead.
    const area = h("textarea.unseen", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"), ...(button.dataset.word ? [t("Copied")] : []));
  setTimeout(() => button.replaceChildren(...before), 1400);
}

/** Asks for a text in a dialog; null if it is cancelled. */
export function ask(question, value) {
  return new Promise((resolve) => {
    const input = h("input", { type: "text", value, "aria-label": question });
    const dialog = h("dialog", null, h("form", { method: "dialog" }, h("h2", null, question), input,
      h(".dialog-actions", null, h("button.plain", { type: "button", onclick: () => dialog.close() }, t("Cancel")),
        h("button.primary", { value: "ok" }, t("OK")))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "ok" ? input.value.trim() : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    input.select();
  });
}

/** Has a screen reader say a text; the thread itself would repeat each word that streams. */
export function say(text) {
  $("said").textContent = text.slice(0, 2000);
}

let toastTimer;
export function toast(text, action, onclick) {
  const node = document.getElementById("toast");
  const undo = action && h("button", { type: "button", onclick: () => { onclick(); node.hidden = true; } }, action);
  node.replaceChildren(text, ...(undo ? [undo] : []));
  node.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { node.hidden = true; }, 6000);
}
