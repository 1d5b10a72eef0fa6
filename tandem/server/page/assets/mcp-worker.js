// Talks to MCP servers (streamable HTTP) for the page. It is a worker because its content security policy lets it reach
// other hosts, which the page's own does not. A job is { id, action, server: { url, headers }, ... }; its answer has the same id.

const VERSION = "2025-06-18";
const MAX_PAGES = 20; // of a list of tools
const MAX_ANSWER = 16 << 20, MAX_ERROR = 500; // characters
const sessions = new Map(); // url and headers -> promise of { id, version }
const stoppers = new Map(); // id of a job -> AbortController
let last = 0;

const ACTIONS = {
  tools: (job, signal) => listTools(job.server, signal),
  call: ({ server, name, values }, signal) => ask(server, "tools/call", { name, arguments: values }, signal),
  forget: async ({ server }) => { sessions.delete(keyOf(server)); },
};

addEventListener("message", async ({ data: job }) => {
  if (job.action === "stop") { stoppers.get(job.id)?.abort(); return; }
  const stopper = new AbortController();
  stoppers.set(job.id, stopper);
  try {
    const stopped = new Promise((_, reject) => { stopper.signal.addEventListener("abort", () => reject(new Error("stopped"))); });
    postMessage({ id: job.id, result: await Promise.race([ACTIONS[job.action](job, stopper.signal), stopped]) });
  } catch (error) {
    const { signal: { aborted } } = stopper;
    postMessage({ id: job.id, error: { aborted, unreachable: error instanceof TypeError, status: error.status, message: error.message } });
  }
  stoppers.delete(job.id);
});

const keyOf = ({ url, headers }) => JSON.stringify([url, headers]);

async function listTools(server, signal) {
  const tools = [];
  let cursor;
  for (let page = 0; page < MAX_PAGES && (page === 0 || cursor); page++) {
    const found = await ask(server, "tools/list", cursor ? { cursor } : {}, signal);
    for (const tool of found.tools) if (typeof tool?.name === "string") tools.push(tool);
    cursor = found.nextCursor;
  }
  return tools;
}

/** The result of a request, in a session that is begun if there is none, and once again if the server has forgotten it. */
async function ask(server, method, params, signal, again = true) {
  const key = keyOf(server);
  if (!sessions.has(key)) {
    const begun = begin(server);
    sessions.set(key, begun);
    begun.catch(() => sessions.delete(key));
  }
  const session = await sessions.get(key);
  const id = ++last;
  try {
    return await send(server, session, { id, method, params }, signal);
  } catch (error) {
    if (signal.aborted) send(server, session, { method: "notifications/cancelled", params: { requestId: id } }).catch(() => {});
    if (![400, 404, 502].includes(error.status) || !again) throw error;
    sessions.delete(key);
    if (error.status === 502 && method === "tools/call") throw error; // it may have been made, and was allowed once
    return ask(server, method, params, signal, false);
  }
}

async function begin(server) {
  const session = { id: null, version: null };
  const about = await send(server, session, { id: ++last, method: "initialize", params: {
    protocolVersion: VERSION, capabilities: {}, clientInfo: { name: "tandem", version: "1" } } });
  session.version = about.protocolVersion;
  await send(server, session, { method: "notifications/initialized" });
  return session;
}

/** Sends a message, and returns the result if it is a request. */
async function send(server, session, message, signal) {
  const response = await fetch(server.url, { method: "POST", signal, credentials: "omit", headers: {
    ...server.headers, "content-type": "application/json", accept: "application/json, text/event-stream",
    ...(session.id && { "mcp-session-id": session.id }), ...(session.version && { "mcp-protocol-version": session.version }),
  }, body: JSON.stringify({ jsonrpc: "2.0", ...message }) });
  if (!response.ok) {
    const text = await textOf(response).catch(() => "");
    throw Object.assign(new Error(text.slice(0, MAX_ERROR)), { status: response.status });
  }
  session.id ??= response.headers.get("mcp-session-id");
  if (message.id === undefined || !message.method) {
    response.body?.cancel();
    return undefined;
  }
  const isStream = response.headers.get("content-type")?.startsWith("text/event-stream");
  const answer = isStream ? await fromEvents(server, session, response, message.id) : JSON.parse(await textOf(response));
  if (answer.error) throw new Error(String(answer.error.message).slice(0, MAX_ERROR));
  return answer.result;
}

/** The text of a response; none of an endless one. */
async function textOf(response) {
  let text = "";
  for await (const part of parts(response)) text = checked(text + part);
  return text;
}

async function* parts(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

function checked(text) {
  if (text.length > MAX_ANSWER) throw new Error(`the answer has more than ${MAX_ANSWER} characters`);
  return text;
}

/** The answer to a request among the events of its stream. */
async function fromEvents(server, session, response, id) {
  let pending = "";
  for await (const part of parts(response)) {
    const events = (pending + part).replace(/\r\n/g, "\n").split("\n\n");
    pending = checked(events.pop());
    for (const event of events) {
      const answer = take(server, session, event, id);
      if (answer) return answer;
    }
  }
  const answer = take(server, session, pending, id);
  if (!answer) throw new Error("the stream ended without an answer");
  return answer;
}

/** The message of an event if it is the answer to request `id`; a request of the server is answered. */
function take(server, session, event, id) {
  const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
  const message = data.trim() ? JSON.parse(data) : {};
  if (message.id === id && !message.method) return message;
  if (message.method && message.id !== undefined) { // this client offers nothing to it
    const known = message.method === "ping" ? { result: {} } : { error: { code: -32601, message: "Method not found" } };
    send(server, session, { id: message.id, ...known }).catch(() => {});
  }
  return undefined;
}
