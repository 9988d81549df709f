// Console of a Meridian hub: receives snapshots, and shows the page of the address.

import { clock, h, morphChildren, s, setColours } from "./dom.js";
import { moveTo } from "./map.js";
import { NOT_FOUND, PAGES } from "./pages.js";
import { addressOf, zoneOf } from "./zones.js";

const SAMPLES_MAX = 300;
// Time after which the hub is tried again, and time without a snapshot, which comes each second, after which the connection is lost.
const RETRY_MS = 1500, STALE_MS = 5000;
// Interval at which the page of drills is loaded.
const DRILLS_MS = 1000;
// Time limit of a request: a lookup or a search takes up to nine seconds.
const REQUEST_MS = 15_000;
// `visitor` is undefined until the hub has said who the person is, and null if nobody is signed in. `problem` is that of an action or
// of a link, and `outage` is why there are no snapshots. `zone` is the
// residency zone that the map marks, and `inspected` has the keys of what a person looks at on the map.
// Names of deployments and regions are keys, so that one named `constructor` finds nothing else.
const seriesByName = (samples) => Object.assign(Object.create(null), samples);
const state = { snapshot: null, history: { total: [], regions: seriesByName({}), deployments: seriesByName({}) }, visitor: undefined, lookup: null, search: null, drills: null, problem: null, outage: null, live: false, zone: "", inspected: { pointed: null, focused: null, hasFocus: false } };
const content = document.getElementById("content");
let scheduled = false, stream = null, retry = null, receivedAt = 0, sampledAt = 0, announced = null;

async function failure(response) {
  const body = await response.json().catch(() => null);
  return Object.assign(new Error(body?.error?.message ?? `The hub returned ${response.status}.`), { status: response.status });
}

// Sends a request to the console. Those that change something have a header that pages of other origins cannot set.
async function call(path, options = {}) {
  const headers = { "x-meridian-console": "1", "content-type": "application/json" };
  const response = await fetch(path, { ...options, headers, signal: AbortSignal.timeout(REQUEST_MS) });
  if (!response.ok) throw await failure(response);
  return response.status === 204 ? null : response.json();
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

// Page, name or id, and residency zone of the address. Names and ids have no question mark: it is encoded in links.
function route() {
  const [address, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [path = "", ...rest] = address.split("/");
  return { page: PAGES.find((page) => page.path === path) ?? NOT_FOUND, parameter: decoded(rest.join("/")), zone: zoneOf(new URLSearchParams(query)) };
}

// Adds a sample a second to the history, which the hub has sent for the time before.
function sample(snapshot) {
  const second = Math.floor(snapshot.at_ms / 1000);
  if (second === sampledAt) return;
  sampledAt = second;
  const values = (traffic) => [traffic.rate, traffic.failed, traffic.p50_ms ?? 0, traffic.p99_ms ?? 0];
  const before = state.history.total.length;
  const push = (samples, value) => { samples.push(value); if (samples.length > SAMPLES_MAX) samples.shift(); };
  const extend = (series, rows, zero) => {
    for (const [name, value] of rows) series[name] ??= new Array(before).fill(zero);
    const current = new Map(rows);
    for (const name of Object.keys(series)) push(series[name], current.get(name) ?? zero);
  };
  extend(state.history.regions, snapshot.regions.filter((region) => region.traffic.rate || state.history.regions[region.id]).map((region) => [region.id, region.traffic.rate]), 0);
  extend(state.history.deployments, snapshot.deployments.map((deployment) => [deployment.name, values(deployment.traffic)]), [0, 0, 0, 0]);
  push(state.history.total, values(snapshot.total));
}

// Reads the latest change aloud. The first snapshot has old ones, and a restarted hub numbers its events anew.
function announce(snapshot) {
  const [latest] = snapshot.events.filter((event) => ["health", "drain"].includes(event.kind));
  const number = latest?.number ?? 0;
  if (announced !== null && number > announced) document.getElementById("announcer").textContent = `${latest.subject} is ${latest.to}`;
  announced = number;
}

function signIn(message) {
  return [h("section", { class: "card signin" }, h("h1", {}, "Sign in"), message && h("p", { class: "bad", role: "alert" }, message),
    h("p", {}, "Run this with the identity of a viewer or operator, and open the link that it prints:"), h("pre", { tabindex: "0" }, h("code", {}, "meridian console --hub URL --identity DIR")))];
}

function statusBar() {
  if (!state.visitor) return [];
  const text = state.live ? "live" : state.snapshot ? `reconnecting, as of ${clock(state.snapshot.at_ms)}` : "connecting";
  return [h("span", { class: `live ${state.live ? "live" : "wait"}`, role: "status" }, s("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" }, s("circle", { cx: 5, cy: 5, r: 4 })), text),
    h("span", { class: "soft role" }, state.visitor.role), h("button", { type: "button", "data-action": "logout" }, "Sign out")];
}

function parts(page, parameter) {
  const empty = (text) => [h("p", { class: "empty" }, text)];
  if (state.visitor === undefined) return empty(state.outage ?? "Loading…");
  if (state.visitor === null) return signIn(state.problem);
  const notices = [state.problem, state.outage].filter(Boolean).map((text) => h("p", { class: "notice bad", role: "alert" }, text));
  return [notices, state.snapshot ? page.render(state, parameter) : empty("Waiting for the route table…")];
}

function render() {
  scheduled = false;
  const { page, parameter, zone } = route();
  state.zone = zone;
  const nav = h("nav", {}, h("ul", {}, PAGES.map(({ path, title }) => h("li", {}, h("a", { href: `#/${path}`, "aria-current": path === page.path ? "page" : null }, title)))));
  morphChildren(document.getElementById("pages"), state.visitor ? nav : h("nav"));
  morphChildren(document.getElementById("status"), h("div", {}, statusBar()));
  document.title = `${state.visitor === null ? "Sign in" : page.title} · Meridian console`;
  const focused = document.activeElement;
  morphChildren(content, h("main", {}, parts(page, parameter)));
  // A person has changed it, or the address: attributes do not change the value any more.
  const zones = document.getElementById("map-zone");
  if (zones && zones.value !== zones.dataset.value) zones.value = zones.dataset.value;
  content.className = `page-${page.path || "overview"}`;
  // An element that an update has moved loses the focus.
  if (focused !== document.activeElement && content.contains(focused)) focused.focus({ preventScroll: true });
}

function schedule() {
  if (!scheduled) { scheduled = true; requestAnimationFrame(render); }
}

// Looks a request up. A response to an earlier lookup does not replace a later one.
async function lookup(id) {
  const started = { id, pending: true };
  state.lookup = started;
  schedule();
  const ended = await call(`/api/requests/${encodeURIComponent(id)}`).then((result) => ({ id, result }), (error) => ({ id, problem: error.message }));
  if (state.lookup === started) state.lookup = ended;
  schedule();
}

// Searches for requests. A response to an earlier search does not replace a later one.
async function search(filter) {
  const started = { pending: true };
  state.search = started;
  schedule();
  const ended = await call(`/api/requests?${new URLSearchParams(filter)}`).then((result) => ({ result }), (error) => ({ problem: error.message }));
  if (state.search === started) state.search = ended;
  schedule();
}

// Conditions of the search form as the hub expects them. The second that a person gives as the end is included, as the page shows
// times to the second.
function filterOf(form) {
  const given = [...new FormData(form)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
  const { period, until, ...conditions } = Object.fromEntries(given);
  const end = until ? Math.floor(Date.parse(until) / 1000) * 1000 + 1000 : Date.now();
  return { ...conditions, since_ms: end - Number(period) * 60_000, ...(until ? { until_ms: end } : {}) };
}

// Loads the drills while their page is shown. While the hub restarts in a drill, the last state stays.
let isLoadingDrills = false;
async function loadDrills() {
  if (isLoadingDrills || !state.visitor || route().page.path !== "drills") return;
  isLoadingDrills = true;
  try {
    state.drills = await call("/api/drills");
  } catch (error) {
    if (error.status) state.drills = { problem: error.message };
  } finally {
    isLoadingDrills = false;
  }
  schedule();
}

async function act(send) {
  try {
    await send();
    state.problem = null;
  } catch (error) {
    state.problem = error.message;
    if (error.status === 401) start();
  }
  schedule();
}

const ACTIONS = {
  drain: ({ region }) => confirm(`Drain ${region}? Its traffic moves to other allowed regions within some ten seconds.`) && act(() => call(`/api/drains/${region}`, { method: "PUT" })),
  undrain: ({ region }) => act(() => call(`/api/drains/${region}`, { method: "DELETE" })),
  promote: ({ deployment }) => confirm(`Switch the traffic of ${deployment} to the next model?`) && act(() => call(`/api/promotions/${encodeURIComponent(deployment)}`, { method: "POST" })),
  startDrill: ({ drill }) => confirm(`Start the drill ${drill}? It sends load to this fleet and injects faults; afterwards its processes, links, replicas and drains are as before.`) && act(() => call(`/api/drills/${encodeURIComponent(drill)}`, { method: "POST" })).then(loadDrills),
  stopDrill: () => act(() => call("/api/drills", { method: "DELETE" })).then(loadDrills),
  logout: async () => {
    try {
      await call("/api/logout", { method: "POST" });
    } catch (error) {
      if (error.status !== 401) {
        state.problem = `You are still signed in: ${error.message}`;
        schedule();
        return;
      }
    }
    location.reload();
  },
};

// Returns why the hub rejects the stream, which an EventSource does not say.
async function rejection() {
  const aborted = new AbortController();
  try {
    const response = await fetch("/api/events", { signal: aborted.signal });
    return response.ok ? null : (await failure(response)).message;
  } catch {
    return null;
  } finally {
    aborted.abort();
  }
}

function connect() {
  stream?.close();
  const opened = new EventSource("/api/events");
  stream = opened;
  opened.onmessage = ({ data }) => {
    // The charts have no gap: what the hub has recorded meanwhile is loaded.
    if (!state.live && state.snapshot) call("/api/history").then(loadHistory, () => {});
    state.snapshot = JSON.parse(data);
    state.live = true;
    state.outage = null;
    receivedAt = Date.now();
    sample(state.snapshot);
    announce(state.snapshot);
    schedule();
  };
  opened.onerror = async () => {
    if (stream !== opened) return;
    state.live = false;
    schedule();
    // The browser connects again by itself, unless the hub has responded with an error.
    if (opened.readyState !== EventSource.CLOSED) return;
    const reason = await rejection();
    if (stream !== opened) return;
    state.outage = reason;
    schedule();
    startLater();
  };
}

function loadHistory({ total, regions, deployments, colours }) {
  setColours(colours);
  state.history = { total, regions: seriesByName(regions), deployments: seriesByName(deployments) };
}

function startLater(login) {
  clearTimeout(retry);
  retry = setTimeout(() => start(login), RETRY_MS);
}

function signedOut(message) {
  stream?.close();
  stream = null;
  Object.assign(state, { visitor: null, snapshot: null, lookup: null, search: null, drills: null, live: false, outage: null, problem: message });
}

// Signs in with the secret of a link, or with the session, and connects.
async function start(login) {
  clearTimeout(retry);
  try {
    state.visitor = login ? await call("/api/login", { method: "POST", body: JSON.stringify({ login }) }) : await call("/api/session");
    if (login) state.problem = null;
    login = undefined;
    loadHistory(await call("/api/history"));
    connect();
    const { page, parameter } = route();
    if (page.path === "requests" && parameter && state.lookup?.id !== parameter) lookup(parameter);
  } catch (error) {
    if (error.status === 401 || error.status === 403) {
      signedOut(login || error.status === 403 ? error.message : null);
    } else {
      // The hub is not reachable or overloaded, which says nothing about the session.
      state.live = false;
      state.outage = error.status ? error.message : "The hub cannot be reached.";
      startLater(login);
    }
  }
  schedule();
}

// Starts, with the secret of the link if the address has one, which is removed from it.
function begin() {
  const login = location.hash.match(/^#login=([0-9a-f]+)$/)?.[1];
  if (login) history.replaceState(null, "", "/#/");
  start(login);
}

document.addEventListener("click", (event) => {
  // The skip link would change the address, which names the page.
  if (event.target.closest(".skip")) {
    event.preventDefault();
    content.focus();
    return;
  }
  const target = event.target.closest("button[data-action]");
  if (target) ACTIONS[target.dataset.action]?.(target.dataset);
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.target.dataset.action === "search") { search(filterOf(event.target)); return; }
  const id = new FormData(event.target).get("id")?.trim();
  if (!id) return;
  if (location.hash === `#/requests/${encodeURIComponent(id)}`) lookup(id);
  else location.hash = `#/requests/${encodeURIComponent(id)}`;
});
document.addEventListener("change", ({ target }) => {
  if (target.dataset.action !== "zone") return;
  // Not a new page: the focus stays.
  history.replaceState(null, "", `/${addressOf(target.value)}`);
  schedule();
});
const keyOnMap = (target) => target.closest?.(".map [role=img]")?.dataset.key ?? null;
document.addEventListener("pointerover", ({ target }) => {
  const key = keyOnMap(target);
  if (key === state.inspected.pointed) return;
  state.inspected.pointed = key;
  schedule();
});
const onFocus = ({ target, type }) => {
  const key = keyOnMap(target), hasFocus = key !== null && type === "focusin";
  if (key === null && !state.inspected.hasFocus) return;
  Object.assign(state.inspected, { focused: key ?? state.inspected.focused, hasFocus });
  schedule();
};
document.addEventListener("focusin", onFocus);
document.addEventListener("focusout", onFocus);
document.addEventListener("keydown", (event) => {
  const from = event.target.closest?.(".map [role=img]");
  const to = from && !event.ctrlKey && !event.metaKey && !event.altKey && moveTo(event.key, from);
  if (!to) return;
  // The arrow keys would scroll the page.
  event.preventDefault();
  to.focus();
});
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#login=")) { begin(); return; }
  const { page, parameter } = route();
  if (page.path === "requests" && parameter && state.visitor) lookup(parameter);
  loadDrills();
  state.problem = null;
  render();
  content.focus({ preventScroll: true });
  scrollTo(0, 0);
});
setInterval(loadDrills, DRILLS_MS);
setInterval(() => {
  if (!state.live || Date.now() - receivedAt < STALE_MS) return;
  state.live = false;
  start();
}, 1000);
begin();
