// The page's languages. Texts are written in English in the code; a dictionary has the others by them.

export const LANGUAGES = { en: "English", de: "Deutsch", es: "Español", fr: "Français", zh: "中文" };
const KEY = "tandem.language";

const wanted = [localStorage.getItem(KEY), ...navigator.languages.map((tag) => tag.slice(0, 2))];
export const language = wanted.find((code) => code in LANGUAGES) ?? "en";
const words = language === "en" ? {} : await import(`./lang/${language}.js`).then((file) => file.default, () => ({}));

/** A text in the page's language; `{name}` stands for a value. */
export function t(text, values = {}) {
  return (words[text] ?? text).replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

export const number = (value, digits = 0) =>
  value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Translates the page's HTML in place. */
export function translatePage() {
  document.documentElement.lang = language;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim();
    if (text in words) texts.currentNode.data = t(text);
  }
  for (const name of ["aria-label", "placeholder", "title"]) {
    for (const node of document.querySelectorAll(`[${name}]`)) node.setAttribute(name, t(node.getAttribute(name)));
  }
}

export function setLanguage(code) {
  localStorage.setItem(KEY, code);
  location.reload();
}
