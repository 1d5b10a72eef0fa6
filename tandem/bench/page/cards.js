// What the page is made of: cards with a picture, a legend, a table.

const page = document.getElementById("page");
const pictures = [];

function card(id, title, note, kind = "card") {
  const made = make(page, "section", { class: kind, id });
  make(made, "h2", {}, title);
  if (note) make(made, "p", { class: "note" }, note);
  return made;
}

function picture(parent, draw) {
  pictures.push({ box: make(parent, "div", { class: "plot" }), draw, width: 0 });
}

function redraw(all) {
  for (const each of pictures) {
    if (!all && each.width === each.box.clientWidth) continue;
    each.width = each.box.clientWidth;
    each.draw(each.box);
  }
}

const KEYS = {
  dot: ["circle", { cx: 8, cy: 6, r: 5 }, "fill"],
  ring: ["circle", { cx: 8, cy: 6, r: 4, fill: "none", "stroke-width": 2 }, "stroke"],
  whole: ["path", { d: "M3 6L8 1L13 6L8 11Z", fill: "none", "stroke-width": 1.8 }, "stroke"],
  band: ["rect", { x: 1, y: 1, width: 14, height: 10, rx: 3, "fill-opacity": 0.3 }, "fill"],
  line: ["path", { d: "M0 6h16", "stroke-width": 2 }, "stroke"],
};

// Entries are [text, one of KEYS, colour].
function legend(parent, entries) {
  const box = make(parent, "div", { class: "legend" });
  for (const [text, key, paint] of entries) {
    const entry = make(box, "span"), [tag, attributes, painted] = KEYS[key];
    const svg = make(entry, "svg", { width: 16, height: 12, "aria-hidden": "true" });
    make(svg, tag, { ...attributes, [painted]: paint });
    entry.append(text);
  }
}

// A cell is a text, or two: one and a smaller one under it.
function table(parent, head, lines) {
  const made = make(make(parent, "div", { class: "scroll" }), "table");
  const top = make(make(made, "thead"), "tr"), body = make(made, "tbody");
  for (const text of head) make(top, "th", {}, text);
  for (const { cells, invalid } of lines) {
    const line = make(body, "tr", invalid ? { class: "invalid" } : {});
    for (const [text, under] of cells.map((cell) => [cell].flat())) {
      const cell = make(line, "td", {}, text);
      if (under) make(cell, "small", {}, under);
    }
  }
}

function list(parent, texts) {
  const made = make(parent, "ul");
  for (const text of texts) make(made, "li", {}, text);
}
