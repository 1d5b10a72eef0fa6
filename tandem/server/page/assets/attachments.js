// How files of a message look: images as previews, texts by name. Both open in a dialog.

import { h, icon } from "./dom.js";
import { t } from "./i18n.js";

/** A button that shows a file. */
export function chip(file) {
  const node = h(`button.chip${file.blob ? ".image" : ""}`, { type: "button", title: file.name, onclick: () => open(file),
    "aria-label": t("Show {name}", { name: file.name }) });
  node.append(...(file.blob ? [image(file)] : [icon("file"), h("span", null, file.name)]));
  return node;
}

function image({ blob, name }) {
  const url = URL.createObjectURL(blob);
  const free = () => URL.revokeObjectURL(url);
  return h("img", { src: url, alt: name, onload: free, onerror: free });
}

function open(file) {
  const close = h("button.primary", { value: "ok" }, t("Close"));
  const dialog = h("dialog.viewer", { "aria-label": file.name }, h("form", { method: "dialog" },
    file.blob ? image(file) : h("pre", { tabIndex: 0 }, file.text), h(".dialog-actions", null, h("span.note", null, file.name), close)));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); }); // beside it
  document.body.append(dialog);
  dialog.showModal();
  close.focus();
}
