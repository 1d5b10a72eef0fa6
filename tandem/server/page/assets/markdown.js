// Renders the Markdown that models write as DOM nodes, from the tokens of markdown-it: no text is ever parsed as HTML.
// HTML is shown as text; links go to http, https and mailto only; an image becomes a link, because the page loads nothing
// from other hosts. KaTeX and highlight.js are loaded when a text first needs them.

import { diagram } from "./diagram.js";
import { copyText, h, icon } from "./dom.js";
import { t } from "./i18n.js";
import { addMath } from "./math.js";
import "./vendor/markdown-it.js";

// The libraries may take a time that grows with the square of a text's length, and whoever writes the text may know how.
const MAX_PAINTED = 40_000, PAINTED_AT_ONCE = 6_000; // characters of a code block that is highlighted, and of its parts
const MAX_TEX = 2_000; // characters of a formula
const DEFINITION = /\\(?:[egx]?def|(?:future)?let|(?:re)?newcommand|providecommand)(?![A-Za-z])/; // macros multiply a text
const SLOW = 300, AT_ONCE = 1_000, SLICE = 50; // ms
let patience = 2_000; // ms that slow parts may take of this page; then texts stay plain

const parser = globalThis.markdownit({ breaks: true, linkify: true }).disable("entity").use(addMath);
parser.validateLink = () => true; // `link` decides
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

/** Renders a text in a container. Unchanged blocks stay, so a stream renders only its last block again. */
export function show(container, text) {
  const env = {}, lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = blocks(parser.parse(lines.join("\n"), env), lines);
  const references = JSON.stringify(env.references ?? null); // a late definition changes earlier links
  const known = container.references === references ? container.blocks : [];
  let same = 0;
  while (same < known.length && same < found.length && known[same].key === found[same].key) same++;
  for (let i = 0; i < same; i++) found[i].node = known[i].node;
  const grown = known[same]?.tokens[0], now = found[same]?.tokens[0]; // a code block that grows keeps its node
  if (grown?.type === "fence" && now?.type === "fence" && grown.info === now.info) {
    found[same].node = known[same++].node;
    found[same - 1].node.write(now.content);
  }
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of found.slice(same)) container.append(block.node = draw(block.tokens)[0]);
  Object.assign(container, { blocks: found, references });
}

/** The tokens of each block of the document; its key is its source. */
function blocks(tokens, lines) {
  const found = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) {
      found.push({ key: lines.slice(token.map[0], token.map[1]).join("\n"), tokens: [] });
    }
    found.at(-1).tokens.push(token);
  }
  return found;
}

function draw(tokens) {
  const root = h("div"), open = [root];
  for (const token of tokens) {
    const into = open.at(-1);
    if (token.nesting === 1) {
      const node = token.hidden ? into : element(token);
      if (node !== into) into.append(node);
      open.push(node.content ?? node);
    } else if (token.nesting === -1) {
      const closed = open.pop();
      if (token.type === "list_item_close") addCheckbox(closed);
    } else {
      into.append(...leaf(token));
    }
  }
  return [...root.childNodes];
}

function element(token) {
  switch (token.type) {
    case "heading_open": return h(`h${Math.min(6, Number(token.tag[1]) + 1)}`); // the page has the h1
    case "link_open": return link(token.attrGet("href"));
    case "table_open": {
      const table = h("table"), box = h(".table", { tabIndex: 0, role: "group" }, table); // it scrolls
      box.content = table;
      return box;
    }
    case "th_open": case "td_open": {
      const align = /(center|right)$/.exec(token.attrGet("style") ?? "");
      return h(align ? `${token.tag}.${align[1]}` : token.tag);
    }
    case "s_open": return h("del");
    case "ordered_list_open": return h("ol", { start: token.attrGet("start") });
    default: return h(token.tag);
  }
}

function leaf(token) {
  switch (token.type) {
    case "inline": return draw(token.children);
    case "text": return token.content ? [token.content] : [];
    case "softbreak": case "hardbreak": return [h("br")];
    case "code_inline": return [h("code", null, token.content)];
    case "hr": return [h("hr")];
    case "fence": return [codeBlock(token.content, token.info.trim().split(/\s/)[0])];
    case "code_block": return [codeBlock(token.content, "")];
    case "math": return [math(token)];
    case "image": {
      const node = link(token.attrGet("src"));
      node.append(...draw(token.children));
      return [node];
    }
    default: return [token.content];
  }
}

function link(target) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return h("span");
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer" });
}

/** Shows "[x] " at the beginning of a list item as a checkbox. */
function addCheckbox(item) {
  const first = item.firstChild?.tagName === "P" ? item.firstChild.firstChild : item.firstChild;
  const box = /^\[([ xX])\] /.exec(first?.nodeType === Node.TEXT_NODE ? first.data : "");
  if (!box) return;
  first.data = first.data.slice(box[0].length);
  item.className = "task";
  item.prepend(h("input", { type: "checkbox", checked: box[1] !== " ", disabled: true, "aria-label": box[1] === " " ? t("open") : t("done") }));
}

// ---- code

const loadHighlighter = once(async () => (await import("./vendor/highlight.js")).default);

function codeBlock(text, language) {
  const code = h("code"), copy = h("button", { type: "button", "aria-label": t("Copy code"), "data-word": "1",
    onclick: () => copyText(code.textContent, copy) }, icon("copy"), t("Copy"));
  const draws = language.toLowerCase() === "mermaid" && h("button", { type: "button", "aria-expanded": "false", onclick: () => {
    const shown = node.querySelector("iframe");
    if (shown) shown.remove();
    else node.append(diagram(code.textContent));
    draws.ariaExpanded = String(!shown);
  } }, t("Diagram"));
  const node = h("figure.code", null, h("figcaption", null, h("span", null, language || t("text")), draws, copy),
    h("pre", { tabIndex: 0 }, code));
  node.write = (content) => {
    code.textContent = content.replace(/\n$/, "");
    if (language) loadHighlighter((highlighter) => drawSoon(() => paint(highlighter, code, language.toLowerCase())));
  };
  node.write(text);
  return node;
}

/** Colours code by highlight.js, whose output is text and <span class="...">. */
function paint(highlighter, code, language) {
  const text = code.textContent;
  if (!highlighter.getLanguage(language) || text.length > MAX_PAINTED) return;
  const open = [h("code")];
  for (const some of partsOf(text)) {
    const painted = patiently(() => highlighter.highlight(some, { language, ignoreIllegals: true }).value);
    if (painted === undefined) open[0].append(some);
    for (const part of painted?.split(/(<span class="[^"]*">|<\/span>)/) ?? []) {
      if (part === "</span>") {
        open.pop();
      } else if (part.startsWith("<span")) {
        const span = h("span", { className: part.slice('<span class="'.length, -'">'.length) });
        open.at(-1).append(span);
        open.push(span);
      } else {
        open.at(-1).append(part.replace(/&(?:amp|lt|gt|quot|#x27);/g, (entity) => ENTITIES[entity]));
      }
    }
  }
  code.replaceChildren(...open[0].childNodes);
}

/** The parts of a code block that are highlighted one by one, cut at ends of lines where there are some. */
function partsOf(text) {
  const found = [];
  for (let at = 0; at < text.length; at += found.at(-1).length) {
    const end = at + PAINTED_AT_ONCE, newline = end < text.length ? text.lastIndexOf("\n", end - 1) : -1;
    found.push(text.slice(at, newline > at ? newline + 1 : end));
  }
  return found;
}

const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };

// ---- patience

/** What `draw` returns; undefined if slow ones have taken all patience, which a reload brings back. */
function patiently(draw) {
  if (patience <= 0) return undefined;
  const begun = performance.now();
  try {
    return draw();
  } finally {
    const took = performance.now() - begun;
    if (took > SLOW) patience -= took;
  }
}

const waiting = []; // draws that had to wait: a page with thousands of formulas does not freeze
let spent = 0; // ms, since the page could last do something else

function drawSoon(draw) {
  if (waiting.length || spent > AT_ONCE) {
    if (waiting.push(draw) === 1) setTimeout(drawWaiting);
    return;
  }
  if (!spent) setTimeout(() => { spent = 0; });
  const begun = performance.now();
  draw();
  spent += performance.now() - begun;
}

function drawWaiting() {
  for (const begun = performance.now(); waiting.length && performance.now() - begun < SLICE;) waiting.shift()();
  if (waiting.length) setTimeout(drawWaiting, SLICE);
}

// ---- LaTeX

const loadKatex = once(async () => {
  const style = h("link", { rel: "stylesheet", href: "/page/vendor/katex.css" });
  const styled = new Promise((resolve, reject) => Object.assign(style, { onload: resolve, onerror: reject }));
  document.head.append(style);
  await Promise.all([styled, import("./vendor/katex.js")]);
  return globalThis.katex;
});

/** Typeset maths, or its source if it is not valid. */
function math({ content, markup, block }) {
  const node = h(`${block ? "div" : "span"}.math${markup === "display" ? ".display" : ""}`, null, content);
  const tex = content.replace(/^(\$\$?|\\[([])|(\$\$?|\\[)\]])\s*$/g, "");
  if (tex.length > MAX_TEX || DEFINITION.test(tex)) return node;
  loadKatex((katex) => drawSoon(() => {
    const shown = h("span");
    try {
      patiently(() => katex.render(tex, shown, { displayMode: markup === "display", strict: "ignore", maxSize: 40 }));
      if (shown.firstChild) node.replaceChildren(...shown.childNodes);
    } catch {
      node.replaceChildren(content);
    }
  }));
  return node;
}

/** A function that calls back with what `load` finds: at once if it is there, and never if it cannot be loaded. */
function once(load) {
  let found, loading;
  return (use) => {
    if (found) return use(found);
    loading ??= load().then((it) => { found = it; });
    return loading.then(() => use(found), () => { loading = undefined; });
  };
}
