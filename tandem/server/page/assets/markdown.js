// Renders the Markdown that models write as DOM nodes. HTML is shown as text; links go to http, https and mailto only;
// an image becomes a link, because the page loads nothing from other hosts.

import { copyText, h, icon } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12; // of nested lists and quotes; deeper ones are text

/** Renders a text in a container. Unchanged blocks stay, so a stream renders only its last block again. */
export function show(container, text) {
  const found = blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  const known = container.blocks ?? [];
  let same = 0;
  while (same < known.length && same < found.length && known[same] === found[same].key) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of found.slice(same)) container.append(block.draw());
  container.blocks = found.map((block) => block.key);
}

function blocks(lines, depth) {
  const found = [];
  const add = (from, to, draw) => found.push({ key: lines.slice(from, to).join("\n"), draw });
  let at = 0;
  while (at < lines.length) {
    const line = lines[at], begin = at;
    let match;
    if (!line.trim()) {
      at++;
    } else if ((match = FENCE.exec(line))) {
      const [, indent, fence, language] = match;
      const close = new RegExp(`^ {0,3}${fence[0] === "~" ? "~" : "`"}{${fence.length},}\\s*$`);
      let end = at + 1;
      while (end < lines.length && !close.test(lines[end])) end++;
      const code = lines.slice(at + 1, end).map((l) => (l.startsWith(indent) ? l.slice(indent.length) : l)).join("\n");
      at = Math.min(end + 1, lines.length);
      add(begin, at, () => codeBlock(code, language.trim().split(/\s/)[0]));
    } else if ((match = HEADING.exec(line))) {
      const [, marks, title] = match;
      add(begin, ++at, () => h(`h${Math.min(6, marks.length + 1)}`, null, inline(title)));
    } else if (RULE.test(line)) {
      add(begin, ++at, () => h("hr"));
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inner = [];
      while (at < lines.length && (match = QUOTE.exec(lines[at]))) { inner.push(match[1]); at++; }
      add(begin, at, () => h("blockquote", null, draw(inner, depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      at = listEnd(lines, at);
      const part = lines.slice(begin, at);
      add(begin, at, () => list(part, depth));
    } else if (line.includes("|") && at + 1 < lines.length && DIVIDER.test(lines[at + 1]) && lines[at + 1].includes("-")
               && cells(line).length === cells(lines[at + 1]).length) {
      at += 2;
      while (at < lines.length && lines[at].includes("|")) at++;
      const rows = lines.slice(begin, at);
      add(begin, at, () => table(rows));
    } else {
      at++;
      while (at < lines.length && lines[at].trim() && !startsBlock(lines[at])) at++;
      const text = lines.slice(begin, at).join("\n");
      add(begin, at, () => h("p", null, inline(text)));
    }
  }
  return found;
}

const draw = (lines, depth) => blocks(lines, depth).map((block) => block.draw());
const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line)
  || /^\s{0,3}([-*+]|1[.)])\s/.test(line);
const indentOf = (line) => line.match(/^\s*/)[0].length;

function listEnd(lines, at) {
  const base = indentOf(lines[at]);
  let end = at + 1, blank = false;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) { blank = true; continue; }
    const inside = indentOf(line) > base || (ITEM.test(line) && indentOf(line) >= base && !RULE.test(line));
    if (!inside && (blank || startsBlock(line))) break;
    blank = false;
  }
  while (end > at && !lines[end - 1].trim()) end--;
  return end;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const base = first[1].length, ordered = /\d/.test(first[2]);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= base + 1) {
      items.push({ indent: match[1].length + match[2].length + Math.max(1, match[3].length), lines: [match[4]] });
    } else {
      const { indent, lines: inner } = items.at(-1);
      inner.push(line.slice(Math.min(indentOf(line), indent)));
    }
  }
  const node = h(ordered ? "ol" : "ul", ordered && parseInt(first[2], 10) !== 1 ? { start: parseInt(first[2], 10) } : null);
  for (const item of items) node.append(listItem(item.lines, depth));
  return node;
}

function listItem(lines, depth) {
  const box = /^\[([ xX])\]\s+(.*)$/.exec(lines[0]);
  if (box) lines = [box[2], ...lines.slice(1)];
  const loose = lines.some((line, i) => !line.trim() && i < lines.length - 1);
  const inner = draw(lines, depth + 1);
  const tight = inner.flatMap((node) => (!loose && node.tagName === "P" ? [...node.childNodes] : [node]));
  const check = box && h("input", { type: "checkbox", checked: box[1] !== " ", disabled: true });
  return h(box ? "li.task" : "li", null, check, tight);
}

function cells(row) {
  const parts = row.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/);
  return parts.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(rows) {
  const align = cells(rows[1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, line) => h("tr", null, cells(line).slice(0, align.length).map((cell, i) =>
    h(align[i] ? `${tag}.${align[i]}` : tag, null, inline(cell))));
  return h(".table", null, h("table", null, h("thead", null, row("th", rows[0])),
    h("tbody", null, rows.slice(2).map((line) => row("td", line)))));
}

function codeBlock(code, language) {
  const copy = h("button", { type: "button", "aria-label": "Copy code", "data-word": "1",
    onclick: () => copyText(code, copy) }, icon("copy"), "Copy");
  return h("figure.code", null, h("figcaption", null, h("span", null, language || "text"), copy),
    h("pre", { tabIndex: 0 }, h("code", null, code)));
}

// Inline elements by the pattern at their first character, in order of preference.
const SPANS = [
  [/^(`+)([\s\S]*?[^`])\1(?!`)/, (m) => h("code", null, m[2].replace(/^ (.*) $/, "$1"))],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (m, deep) => h("strong", null, inline(m[1], deep))],
  [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, (m, deep) => h("strong", null, inline(m[1], deep))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (m, deep) => h("del", null, inline(m[1], deep))],
  [/^\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/, (m, deep) => h("em", null, inline(m[1], deep))],
  [/^_(?=[^\s_])([^_]*?[^\s_])_(?!\w)/, (m, deep) => h("em", null, inline(m[1], deep))],
  // A target may have balanced parentheses, as Wikipedia's have.
  [/^!?\[([^\]\n]*)\]\(\s*<?((?:[^\s()>]|\([^\s()>]*\))*)>?(?:\s+["'][^"'\n]*["'])?\s*\)/, (m, deep) => link(m[2], m[1], deep)],
  [/^<((?:https?:\/\/|mailto:)[^\s<>]+)>/, (m, deep) => link(m[1], m[1], deep)],
  [/^https?:\/\/(?:[^\s<>()]|\([^\s<>()]*\))*(?:[^\s<>().,;:!?'"*_`]|\([^\s<>()]*\))/, (m, deep) => link(m[0], m[0], deep)],
  [/^\\\([\s\S]*?\\\)|^\\\[[\s\S]*?\\\]/, (m) => m[0]], // LaTeX stays as the model wrote it
  [/^\\([\\`*_{}[\]()#+\-.!|~>])/, (m) => m[1]],
  [/^ {0,8}\n/, () => h("br")],
];
const MARKS = /[`*_~![<\\]|https?:| {0,8}\n/g;

/** The nodes of inline text. */
function inline(text, deep = 0) {
  if (deep > MAX_DEPTH) return [text];
  const nodes = [];
  let plain = "", at = 0;
  while (at < text.length) {
    MARKS.lastIndex = at;
    const mark = MARKS.exec(text);
    if (!mark) break;
    plain += text.slice(at, mark.index);
    at = mark.index;
    const rest = text.slice(at, at + 4000);
    const inWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
    const span = !inWord && SPANS.map(([pattern, make]) => [pattern.exec(rest), make]).find(([found]) => found);
    if (span) {
      if (plain) nodes.push(plain);
      plain = "";
      nodes.push(span[1](span[0], deep + 1));
      at += span[0][0].length;
    } else {
      plain += mark[0];
      at += mark[0].length;
    }
  }
  plain += text.slice(at);
  if (plain) nodes.push(plain);
  return nodes;
}

function link(target, label, deep) {
  const shown = label === target ? [label] : inline(label, deep);
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return h("span", null, shown);
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, shown);
}
