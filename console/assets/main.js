// Console of a Meridian hub: receives snapshots, and shows the page of the address.

import { h, morphChildren, colour, s } from "./dom.js";
import { PAGES } from "./pages.js";

const SAMPLES_MAX = 300;
const state = { snapshot: null, history: { total: [], regions: {}, deployments: {} }, visitor: null, lookup: null, problem: null, live: false };
const content = document.getElementById("content");
let scheduled = false, stream = null, sampledAt = 0, announced = 0;

// Sends a request to the console. Those that change something have a header that pages of other origins cannot set.
async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { "x-meridian-console": "1", "content-type": "application/json" } });
  if (response.ok) return response.status === 204 ? null : response.json();
  const body = await response.json().catch(() => null);
  throw Object.assign(new Error(body?.error?.message ?? `The hub returned ${response.status}.`), { status: response.status });
}

function route() {
  const [path = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const page = PAGES.find((page) => page.path === path) ?? PAGES[0];
  return { page, parameter: rest.length ? decodeURIComponent(rest.join("/")) : "" };
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

function announce(snapshot) {
  const [latest] = snapshot.events.filter((event) => ["health", "drain"].includes(event.kind));
  if (!latest || latest.number <= announced) return;
  if (announced) document.getElementById("announcer").textContent = `${latest.subject} is ${latest.to}`;
  announced = latest.number;
}

function signIn(message) {
  return [h("section", { class: "card signin" }, h("h1", {}, "Sign in"), message && h("p", { class: "bad", role: "alert" }, message),
    h("p", {}, "Run this with the identity of a viewer or operator, and open the link that it prints:"), h("pre", { tabindex: "0" }, h("code", {}, "meridian console --hub URL --identity DIR")))];
}

function render() {
  scheduled = false;
  const { page, parameter } = route();
  const nav = h("nav", {}, h("ul", {}, PAGES.map(({ path, title }) => h("li", {}, h("a", { href: `#/${path}`, "aria-current": path === page.path ? "page" : null }, title)))));
  morphChildren(document.getElementById("pages"), state.visitor ? nav : h("nav"));
  const kind = !state.visitor ? "off" : state.live ? "live" : "wait";
  const status = h("div", {}, state.visitor && [h("span", { class: `live ${kind}`, role: "status" }, s("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" }, s("circle", { cx: 5, cy: 5, r: 4 })), state.live ? "live" : "reconnecting"), h("span", { class: "soft role" }, state.visitor.role), h("button", { type: "button", "data-action": "logout" }, "Sign out")]);
  morphChildren(document.getElementById("status"), status);
  document.title = `${state.visitor ? page.title : "Sign in"} · Meridian console`;
  const next = h("main");
  const parts = !state.visitor ? signIn(state.problem) : state.snapshot ? page.render(state, parameter) : [h("p", { class: "empty" }, "Waiting for the route table…")];
  if (state.visitor && state.problem) next.append(h("p", { class: "notice bad", role: "alert" }, state.problem));
  next.append(...parts.flat(9).filter((part) => part));
  morphChildren(content, next);
  content.className = `page-${page.path || "overview"}`;
}

function schedule() {
  if (!scheduled) { scheduled = true; requestAnimationFrame(render); }
}

async function lookup(id) {
  state.lookup = { id, pending: true };
  schedule();
  try {
    state.lookup = { id, result: await call(`/api/requests/${encodeURIComponent(id)}`) };
  } catch (error) {
    state.lookup = { id, problem: error.message };
  }
  schedule();
}

async function act(problem) {
  try { await problem(); state.problem = null; } catch (error) { state.problem = error.message; }
  schedule();
}

const ACTIONS = {
  drain: ({ region }) => confirm(`Drain ${region}? Its traffic moves to other allowed regions within some ten seconds.`) && act(() => call(`/api/drains/${region}`, { method: "PUT" })),
  undrain: ({ region }) => act(() => call(`/api/drains/${region}`, { method: "DELETE" })),
  promote: ({ deployment }) => confirm(`Switch the traffic of ${deployment} to the next model?`) && act(() => call(`/api/promotions/${encodeURIComponent(deployment)}`, { method: "POST" })),
  logout: async () => { await call("/api/logout", { method: "POST" }).catch(() => {}); location.reload(); },
};

function connect() {
  stream?.close();
  stream = new EventSource("/api/events");
  stream.onmessage = ({ data }) => {
    state.snapshot = JSON.parse(data);
    state.live = true;
    state.snapshot.regions.forEach((region) => colour(region.id));
    sample(state.snapshot);
    announce(state.snapshot);
    schedule();
  };
  stream.onerror = () => {
    state.live = false;
    schedule();
    // The browser connects again by itself, unless the hub has responded with an error.
    setTimeout(() => { if (stream.readyState === EventSource.CLOSED) start(); }, 1500);
  };
}

function loadHistory({ total, regions, deployments }) {
  state.history = { total, regions, deployments };
}

async function start() {
  const login = location.hash.match(/^#login=([0-9a-f]+)$/)?.[1];
  if (login) history.replaceState(null, "", "/#/");
  try {
    state.visitor = login ? await call("/api/login", { method: "POST", body: JSON.stringify({ login }) }) : await call("/api/session");
    state.problem = null;
    loadHistory(await call("/api/history"));
    connect();
  } catch (error) {
    if (error.status) { state.visitor = null; state.problem = login ? error.message : null; } else setTimeout(start, 1500);
  }
  schedule();
  if (route().page.path === "requests" && route().parameter && state.visitor) lookup(route().parameter);
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("button[data-action]");
  if (target) ACTIONS[target.dataset.action]?.(target.dataset);
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  const id = new FormData(event.target).get("id")?.trim();
  if (!id) return;
  if (location.hash === `#/requests/${encodeURIComponent(id)}`) lookup(id);
  else location.hash = `#/requests/${encodeURIComponent(id)}`;
});
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#login=")) { start(); return; }
  const { page, parameter } = route();
  if (page.path === "requests" && parameter && state.visitor) lookup(parameter);
  state.problem = null;
  render();
  // The skip link keeps the page, and its target is the content.
  if (location.hash === "#content") return;
  content.focus({ preventScroll: true });
  scrollTo(0, 0);
});
start();
