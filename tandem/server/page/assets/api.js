// A client of the server's OpenAI API.

import { t } from "./i18n.js";

const KEY = "tandem.key";
const dialog = document.getElementById("key-dialog");

/** The header with the API key, if there is one. */
export function authorization() {
  const key = localStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** fetch with the API key; asks for it if the server returns 401. */
async function request(path, options = {}) {
  for (;;) {
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization() } });
    if (response.status !== 401) return response;
    await askForKey();
  }
}

let keyPrompt;
function askForKey() {
  keyPrompt ??= new Promise((resolve) => {
    const input = document.getElementById("key");
    input.value = "";
    dialog.addEventListener("close", () => {
      localStorage.setItem(KEY, input.value.trim());
      keyPrompt = undefined;
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
  return keyPrompt;
}

async function failure(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new Error(error.message ?? String(error));
  } catch {
    return new Error(t("The server returned status {status}.", { status: response.status }));
  }
}

export async function get(path) {
  const response = await request(path);
  if (!response.ok) throw await failure(response);
  return response.json();
}

export const models = async () => (await get("/v1/models")).data.map((model) => model.id);

/** Streams the chunks of a chat completion. */
export async function* complete(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "", done = false;
  while (!done) {
    const part = await reader.read();
    if (part.done) break;
    pending += part.value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data[0] === "[DONE]") { done = true; break; }
      if (!data.length) continue;
      const chunk = JSON.parse(data.join("\n"));
      if (chunk.error) throw new Error(chunk.error.message ?? t("The server reported an error."));
      yield chunk;
    }
  }
  if (!done) throw new Error(t("The connection was lost before the response was complete: send it again."));
}
