// Keeps the page's files, so that it opens without the server: conversations can be read then. The network comes first, so an
// updated server shows its own files; requests to the model are not touched.

const CACHE = "tandem-page";
const SHELL = [
  "/", "api.js", "app.webmanifest", "attachments.js", "chart.js", "chat.js", "composer.js", "diagram.js", "dom.js", "files.js", "i18n.js", "icon.svg",
  "icon-192.png", "icon-512.png", "live.js", "main.js", "markdown.js", "math.js", "mcp.js", "mcp-worker.js", "options.js", "store.js", "style.css", "theme.js",
  "transfer.js", "tree.js", "vendor/markdown-it.js",
].map((name) => (name === "/" ? name : `/page/${name}`));

addEventListener("install", (event) => event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(SHELL)).then(() => skipWaiting())));
addEventListener("activate", (event) => event.waitUntil(clients.claim()));

addEventListener("fetch", (event) => {
  const { pathname, origin } = new URL(event.request.url);
  const isPage = pathname === "/" || (pathname.startsWith("/page/") && !pathname.endsWith("/service-worker.js"));
  if (event.request.method !== "GET" || origin !== location.origin || !isPage) return;
  event.respondWith(respond(event, pathname));
});

async function respond(event, pathname) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(event.request);
    if (response.ok) event.waitUntil(cache.put(pathname, response.clone()).catch(() => {})); // full: offline it is missing
    return response;
  } catch (error) {
    const kept = await cache.match(pathname, { ignoreVary: true });
    if (kept) return kept;
    throw error;
  }
}
