// Files that a message has: texts ({ name, text }) and images ({ name, blob }).

import { t } from "./i18n.js";

const MAX_BYTES = 50 << 20; // of a file that is read
const MAX_TEXT = 1_000_000; // characters; contexts are smaller
const MAX_PAGES = 500, MAX_PAGE_IMAGES = 8; // of a PDF, as text and as images
const MAX_IMAGE = 600_000; // bytes of an image as it is kept
const MAX_IMAGES = 2_200_000; // bytes of all images of a request: a server takes 4 MiB (max_body), with base64 and text
const MAX_SIDE = 1536; // px of an image as it is kept
const MIN_SIDE = 128; // px below which no image is made smaller
const PASSED_ON = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // types that the server reads

const isPDF = (file) => file.type === "application/pdf" || /\.pdf$/i.test(file.name);

/** What a message has of a file: its text, or an image. A PDF also has its `source`, whose pages can be images. */
export async function readFile(file) {
  const { name } = file;
  if (file.size > MAX_BYTES) throw new Error(t("{name} is larger than 50 MB: choose a smaller file.", { name }));
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return { name, blob: await keptImage(file) };
  if (isPDF(file)) return { name, text: limited(name, await pdfText(file)), source: file };
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(t("{name} is neither a text, a PDF nor an image that the browser can read.", { name }));
  return { name, text: limited(name, text.replace(/\r\n?/g, "\n")) };
}

function limited(name, text) {
  if (text.length > MAX_TEXT) throw new Error(t("{name} has more than 1,000,000 characters: choose a smaller file.", { name }));
  return text;
}

// ---- images

async function keptImage(file) {
  const bitmap = await bitmapOf(file);
  const fits = file.size <= MAX_IMAGE && Math.max(bitmap.width, bitmap.height) <= MAX_SIDE && PASSED_ON.includes(file.type);
  return fits ? new Blob([file], { type: file.type }) : shrink(bitmap, MAX_IMAGE);
}

async function bitmapOf(blob) {
  try {
    return await createImageBitmap(blob);
  } catch {
    throw new Error(t("{name} is neither a text, a PDF nor an image that the browser can read.", { name: blob.name ?? t("Image") }));
  }
}

/** The image as JPEG within a number of bytes, on white where it is transparent. */
async function shrink(bitmap, maxBytes) {
  let side = Math.min(MAX_SIDE, Math.max(bitmap.width, bitmap.height));
  for (;;) {
    const scale = side / Math.max(bitmap.width, bitmap.height);
    const canvas = new OffscreenCanvas(Math.max(1, bitmap.width * scale), Math.max(1, bitmap.height * scale));
    const ink = canvas.getContext("2d");
    ink.fillStyle = "#fff";
    ink.fillRect(0, 0, canvas.width, canvas.height);
    ink.imageSmoothingQuality = "high";
    ink.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const found = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.85 });
    if (found.size <= maxBytes || side <= MIN_SIDE) return found;
    side = Math.max(MIN_SIDE, Math.floor(side * Math.min(0.9, 0.9 * Math.sqrt(maxBytes / found.size))));
  }
}

export function toDataURL(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

export function fromDataURL(url) {
  const [head, data] = url.split(",", 2);
  return new Blob([Uint8Array.from(atob(data), (char) => char.charCodeAt(0))], { type: /^data:([^;]*)/.exec(head)[1] });
}

// ---- PDFs

let loading;
async function openPDF(file) {
  loading ??= import("./vendor/pdf.js").then((library) => {
    library.GlobalWorkerOptions.workerSrc = "/page/vendor/pdf.worker.js";
    return library;
  });
  const library = await loading;
  try {
    return await library.getDocument({ data: await file.arrayBuffer(), isEvalSupported: false, useWasm: false, verbosity: 0 }).promise;
  } catch {
    throw new Error(t("{name} cannot be read as a PDF: it is damaged, or needs a password.", { name: file.name }));
  }
}

async function pdfText(file) {
  const pdf = await openPDF(file), pages = [];
  for (let n = 1; n <= Math.min(pdf.numPages, MAX_PAGES); n++) {
    const { items } = await (await pdf.getPage(n)).getTextContent();
    pages.push(items.map(({ str, hasEOL }) => str + (hasEOL ? "\n" : "")).join("").trim());
  }
  await pdf.loadingTask.destroy();
  return pages.join("\n\n").trim();
}

/** The first pages of a PDF as images. */
export async function pagesAsImages({ name, source }) {
  const pdf = await openPDF(source), images = [];
  for (let n = 1; n <= Math.min(pdf.numPages, MAX_PAGE_IMAGES); n++) {
    const page = await pdf.getPage(n), { width, height } = page.getViewport({ scale: 1 });
    const viewport = page.getViewport({ scale: MAX_SIDE / Math.max(width, height) });
    const canvas = Object.assign(document.createElement("canvas"), { width: viewport.width, height: viewport.height });
    await page.render({ canvas, viewport }).promise;
    images.push({ name: `${name}, ${n}`, blob: await shrink(canvas, MAX_IMAGE) });
  }
  await pdf.loadingTask.destroy();
  return images;
}

// ---- requests

/** A text as a code block, with a fence that it does not have itself. */
export function fenced(text) {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${fence}\n${text}\n${fence}`;
}

/** The messages of a request in OpenAI's form, a call's result after the message with the call. Images are made smaller if they
 * would not fit together. */
export async function toRequest(messages) {
  const images = messages.flatMap(({ files }) => (files ?? []).filter(({ blob }) => blob));
  const total = images.reduce((sum, { blob }) => sum + blob.size, 0);
  const share = total > MAX_IMAGES ? MAX_IMAGES / images.length : Infinity;
  const found = await Promise.all(messages.map(async ({ role, content, files = [], calls }) => {
    if (calls) return withResults(content, calls);
    const texts = files.filter(({ blob }) => !blob).map(({ name, text }) => `${name}:\n${fenced(text)}\n\n`);
    const text = texts.join("") + content;
    const urls = await Promise.all(files.filter(({ blob }) => blob).map(async ({ blob }) =>
      toDataURL(blob.size > share ? await shrink(await bitmapOf(blob), share) : blob)));
    if (!urls.length) return { role, content: text };
    const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: text ? [...parts, { type: "text", text }] : parts };
  }));
  return found.flat();
}

function withResults(content, calls) {
  const results = calls.map(({ id, result, refused }) => ({ role: "tool", tool_call_id: id,
    content: result ?? (refused ? "The user refused this call." : "The user has not allowed this call.") }));
  return [{ role: "assistant", content, tool_calls: calls.map(({ id, name, arguments: given }) =>
    ({ id, type: "function", function: { name, arguments: given } })) }, ...results];
}
