// Creates DOM nodes. Text is always set as text: nothing that a model or a user writes is parsed as HTML.

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
  button.replaceChildren(icon("check"), ...(button.dataset.word ? ["Copied"] : []));
  setTimeout(() => button.replaceChildren(...before), 1400);
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
