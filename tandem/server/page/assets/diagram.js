// Diagrams that models write for mermaid, drawn when the user asks: the library is larger than all of the page.

import { h, toast } from "./dom.js";
import { t } from "./i18n.js";

const TIME = 15_000; // ms for a diagram
let library;

/** A frame with the diagram, which grows to its height; it goes again if the text is no diagram. */
export function diagram(text) {
  const frame = h("iframe", { src: "/page/diagram.html", title: t("Diagram") });
  const end = () => {
    removeEventListener("message", listen);
    frame.remove();
    toast(t("The diagram cannot be drawn: it is not valid, or too large."));
  };
  const timer = setTimeout(end, TIME);
  const listen = ({ source, data }) => {
    if (source !== frame.contentWindow) return;
    clearTimeout(timer);
    if (Number.isFinite(data.height)) frame.style.height = `${Math.min(data.height, 4000)}px`;
    else end();
  };
  addEventListener("message", listen);
  frame.addEventListener("load", async () => {
    library ??= fetch("/page/vendor/mermaid.js").then((response) => response.text());
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
      || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    frame.contentWindow?.postMessage({ library: await library, text, dark }, "*");
  }, { once: true });
  return frame;
}
