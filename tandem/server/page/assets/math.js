// Finds LaTeX in Markdown, for markdown-it: $a$, $$a$$, \(a\), \[a\] and environments such as \begin{align}.

const MAX_CHARS = 4000, MAX_LINES = 200; // of one formula: where its end is searched
const BLOCK = /^(?:(\$\$)|(\\\[)|\\begin\{((?:align|alignat|equation|gather|multline|cases|[bpvV]?matrix)\*?)\})/;

export function addMath(parser) {
  parser.inline.ruler.before("escape", "math", inline);
  parser.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function inline(state, silent) {
  const begin = state.pos, text = state.src.slice(begin, Math.min(begin + MAX_CHARS, state.posMax));
  const display = /^\$\$[^$]+\$\$|^\\\[[^]+?\\\]/.exec(text);
  const found = display ?? /^\\\([^]+?\\\)/.exec(text) ?? dollars(text, state.src[begin - 1] ?? "");
  if (!found) return false;
  if (!silent) Object.assign(state.push("math", "", 0), { content: found[0], markup: display ? "display" : "" });
  state.pos = begin + found[0].length;
  return true;
}

/** $a$ as in pandoc: no space inside the dollars, and no digit behind them. "$5 and $10" is no formula. */
function dollars(text, before) {
  return /\w/.test(before) ? null : /^\$(?![\s$])(?:[^$\n\\]|\\[^\n])*?(?<!\s)\$(?![\d$])/.exec(text);
}

function block(state, first, end, silent) {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]).trimEnd();
  const opened = BLOCK.exec(line(first));
  if (!opened || state.sCount[first] - state.blkIndent >= 4) return false;
  const close = opened[1] ?? (opened[2] ? "\\]" : `\\end{${opened[3]}}`);
  let last = first, text = line(first);
  while (text.length <= opened[0].length || !text.endsWith(close)) {
    last++;
    if (last >= end || last - first > MAX_LINES || (state.sCount[last] < state.blkIndent && line(last))) return false;
    text += `\n${line(last)}`;
  }
  if (text.indexOf(close, opened[0].length) !== text.length - close.length) return false; // two in one paragraph
  if (silent) return true;
  state.line = last + 1;
  Object.assign(state.push("math", "", 0),
    { block: true, content: text, markup: "display", map: [first, state.line] });
  return true;
}
