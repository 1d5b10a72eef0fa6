// Tools of MCP servers: those that the user adds by their address, and those that the settings of Tandem's server name.

import { authorization, get } from "./api.js";
import { t } from "./i18n.js";
import { read, write } from "./store.js";

const KEY = "tandem.mcp"; // url -> { token, on }
const MAX_RESULT = 50_000; // characters of a result that a model gets
const LIST_TIME = 10_000; // ms for a server to list its tools
const NAME = /[^\w-]/g, MAX_NAME = 64; // as most models have seen names of functions

let worker, last = 0;
const waiting = new Map(); // id of a job -> { resolve, reject }

function work(job, signal) {
  if (signal?.aborted) return Promise.reject(signal.reason);
  if (!worker) {
    worker = new Worker("/page/mcp-worker.js");
    worker.addEventListener("message", ({ data: { id, result, error } }) => {
      const { resolve, reject } = waiting.get(id);
      waiting.delete(id);
      if (error) reject(new Error(reason(error)));
      else resolve(result);
    });
  }
  const id = ++last, { url, token } = job.server;
  const headers = isOwn(url) ? authorization() : token ? { authorization: `Bearer ${token}` } : {};
  signal?.addEventListener("abort", () => worker.postMessage({ id, action: "stop" }));
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject });
    worker.postMessage({ ...job, id, server: { url: new URL(url, location).href, headers } });
  });
}

function reason({ aborted, unreachable, status, message }) {
  if (aborted) return t("It did not answer in time.");
  if (unreachable) return t("It cannot be reached, or does not allow this page (CORS).");
  return status ? t("It returned status {status}.", { status }) : message;
}

// ---- the servers

const isOwn = (url) => url.startsWith("/mcp/");
export function nameOf(url) {
  if (isOwn(url)) return url.slice(5);
  const { host, pathname } = URL.canParse(url) ? new URL(url) : { host: url, pathname: "" }; // an import may have any text
  return host + pathname.replace(/\/$/, "");
}

/** The servers that the user has added, then those of the settings: { url, token, on, own }. */
export async function servers() {
  const kept = read(KEY, {});
  const added = Object.keys(kept).filter((url) => !isOwn(url));
  const own = (await get("/mcp").catch(() => ({ servers: [] }))).servers.map((name) => `/mcp/${name}`);
  return [...added, ...own].map((url) => ({ url, token: "", on: false, ...kept[url], own: isOwn(url) }));
}

/** Keeps a server, or what was changed of it. */
export function keepServer(url, changes) {
  const kept = read(KEY, {});
  write(KEY, { ...kept, [url]: { ...kept[url], ...changes } });
}

export function removeServer({ url, token }) {
  const { [url]: _, ...rest } = read(KEY, {});
  write(KEY, rest);
  work({ action: "forget", server: { url, token } });
}

export function toolsOf(server, signal) {
  const late = AbortSignal.timeout(LIST_TIME);
  return work({ action: "tools", server }, signal ? AbortSignal.any([signal, late]) : late);
}

// ---- tools and their calls

/** The tools of all servers that are on, in OpenAI's form, and where each is: name -> { url, tool }. `failed` is told of
 * servers that do not answer: the model gets the tools of the others. */
export async function tools(failed, signal) {
  const isOn = Object.values(read(KEY, {})).some(({ on }) => on);
  const used = isOn ? (await servers()).filter(({ on }) => on) : [];
  const lists = await Promise.all(used.map((server) => toolsOf(server, signal).catch((error) => {
    signal.throwIfAborted();
    failed(`${nameOf(server.url)}: ${error.message}`);
    return [];
  })));
  const found = { tools: [], places: {} };
  for (const [at, list] of lists.entries()) {
    for (const { name: tool, description, inputSchema: parameters } of list) {
      const name = freeName(tool.replace(NAME, "_").slice(0, MAX_NAME), found.places);
      found.tools.push({ type: "function", function: { name, description, parameters } });
      found.places[name] = { url: used[at].url, tool };
    }
  }
  return found;
}

/** The name, with a number if another server has a tool of this name. */
function freeName(name, taken) {
  for (let n = 2, free = name; ; n++) {
    if (!Object.hasOwn(taken, free)) return free;
    free = `${name.slice(0, MAX_NAME - 3)}_${n}`;
  }
}

/** Makes a call that the user has approved. Returns what the call's message keeps of it: { result, failed }. */
export async function call({ url, tool, arguments: given }, signal) {
  const server = (await servers()).find((one) => one.url === url && one.on);
  if (!server) return { result: t("There is no such tool any more."), failed: true };
  try {
    const { content = [], structuredContent, isError } = await work({ action: "call", server, name: tool, values: JSON.parse(given || "{}") }, signal);
    const parts = content.map((part) => part.text ?? part.resource?.text ?? part.uri ?? `[${part.type}]`);
    const text = parts.length || !structuredContent ? parts.join("\n") : JSON.stringify(structuredContent);
    const left = text.length - MAX_RESULT;
    return { result: left > 0 ? `${text.slice(0, MAX_RESULT)}\n[${left} more characters]` : text, ...(isError && { failed: true }) };
  } catch (error) {
    if (signal.aborted) throw error;
    return { result: error.message, failed: true };
  }
}
