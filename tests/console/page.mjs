// Test of the page alone, at a hub that is simulated here and fails in every way. Environment: BROWSER, ASSETS (folder of the page).
// Exits with 1 and a message for each case that does not hold.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join } from "node:path";
import { chromium } from "playwright-core";
import { hasFocus, tabTo } from "./keyboard.mjs";

const { BROWSER, ASSETS } = process.env;
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml" };
const [EUROPE, AMERICA] = ["gcp/europe-west4", "aws/us-east-1"];
const CLASSES = { [EUROPE]: "c-b97500", [AMERICA]: "c-c656a6" };
const DAY_MS = 86_400_000, TIMEOUT_MS = 10_000, PERIOD_MS = 300;

// What the hub responds with; each case begins with these values.
const USUAL = { session: 200, login: 200, history: 200, stream: 200, drain: 200, logout: 204, isSending: true, event: 1, lookupMs: {}, lookups: 0, histories: 0, drills: 200, search: 200, searchMs: 0, found: [], problems: [], arcs: [], moves: [], regions: null, explanation: null };
const hub = {};
const streams = new Set();

const traffic = { rate: 3, failed: 0, tokens: 1, p50_ms: 10, p99_ms: 20 };
const ZONES = { [EUROPE]: ["nl", "eu"], [AMERICA]: ["us-va", "us"] };
const region = (id, at) => ({ id, city: id, lat: 40 + at, lon: 10 * at, zones: ZONES[id] ?? [], state: "healthy", draining: hub.draining.has(id), registered: true, spokes: [["spoke", "address"]], ready: 1, target: 1, capacity: 100, pending_tokens: 1, held_ms: null, traffic, deployments: [] });
const gateway = (boot, lost) => ({ region: AMERICA, city: "city", lat: 1, lon: 1, boot, age_ms: 1, lost, generation: "1.1", current: true, in_flight: 0, traffic, regions: [] });
const arc = (to, rate, p50_ms) => ({ from: AMERICA, to, health: "healthy", rtt_ms: 8, traffic: { ...traffic, rate, p50_ms } });
const move = (kind, number, ageMs) => ({ number, at_ms: Date.now() - ageMs, last_ms: Date.now() - ageMs, kind, subject: AMERICA, to: EUROPE, cause: kind === "failover" ? "retry" : "spillover", requests: 12, example: "" });
const deployment = (name) => ({ name, task: "embed", model: "model", engine: "cpu f32", residency: "anywhere", placement: [], min: 1, max: 1, ready: 1, target: 1, pending_tokens: 0, held_ms: null, traffic, regions: [], failures: [] });

let sent = 0;
function snapshot() {
  const now = Date.now();
  sent += 1;
  return { at_ms: now, generation: "1.1", total: traffic, regions: hub.regions ?? [region(AMERICA, 0), region(EUROPE, 1)], gateways: [gateway("00", true), gateway("01", false)], arcs: hub.arcs,
    // The order of the rates changes with each snapshot. One name is that of a member of every object.
    deployments: (sent % 2 ? ["constructor", "b"] : ["b", "constructor"]).map(deployment), deployments_omitted: 0, tenants: [], tenants_omitted: 0, tenants_applied: true,
    rollout: { generation: "1.1", pending: [], readers: [], deployments: [] },
    events: [...hub.moves, { number: hub.event, at_ms: now - 3 * DAY_MS, last_ms: now - 3 * DAY_MS, kind: "health", subject: AMERICA, to: "down", cause: "healthy", requests: 0, example: "" }] };
}

const send = (stream) => stream.write(`data: ${JSON.stringify(snapshot())}\n\n`);

function respond(response, path, status, body) {
  response.writeHead(status, { "content-type": "application/json" });
  response.end(status === 204 ? "" : JSON.stringify(status < 300 ? body : { error: { message: `error ${status} of ${path}` } }));
}

const DRILL = { name: "short", description: "A short drill.", duration_ms: 60_000, unmet: null };
const drillRun = (state) => ({ name: DRILL.name, description: DRILL.description, state, is_active: state === "running", duration_ms: DRILL.duration_ms, elapsed_ms: 1000, steps: [], expectations: [], events: [], events_omitted: 0, problems: [] });

// Makes the change of a request, as the hub does; each is recorded with its method.
function change(method, path) {
  hub.changes.push(`${method} ${path}`);
  const drained = path.match(/^\/api\/drains\/(.+)$/)?.[1];
  if (drained && hub.drain === 200) method === "PUT" ? hub.draining.add(drained) : hub.draining.delete(drained);
  if (path.startsWith("/api/drills")) hub.run = drillRun(method === "POST" ? "running" : "stopped");
}

function serve({ url: path, method }, response) {
  if (method !== "GET") change(method, path);
  if (path === "/api/session") return respond(response, path, hub.session, { role: "operator", name: "ada" });
  if (path === "/api/login") return respond(response, path, hub.login, { role: "operator", name: "ada" });
  if (path === "/api/logout") return respond(response, path, hub.logout);
  if (path.startsWith("/api/drains/")) return respond(response, path, hub.drain, {});
  if (path.startsWith("/api/drills") && hub.hasDrills) return respond(response, path, hub.drills, { is_available: true, drills: [DRILL], run: hub.run });
  if (path === "/api/drills") return respond(response, path, hub.drills, { is_available: false, reason: "not here", drills: [], run: null });
  if (path.startsWith("/api/requests?")) {
    hub.searches.push(path);
    const wait = hub.searches.length === 1 ? hub.searchMs : 0;
    return setTimeout(() => respond(response, path, hub.search, { requests: hub.found, has_more: true, unresponsive: [EUROPE], disabled: [AMERICA], problems: hub.problems }), wait);
  }
  if (path === "/api/history") {
    hub.histories += 1;
    return respond(response, path, hub.history, { at_ms: [], total: [], regions: { [EUROPE]: [1, 2] }, deployments: {}, colours: CLASSES });
  }
  if (path.startsWith("/api/requests/")) {
    hub.lookups += 1;
    if (hub.explanation) return respond(response, path, 200, { gateway: AMERICA, explanation: hub.explanation });
    return setTimeout(() => respond(response, path, 404), hub.lookupMs[path.split("/").pop()] ?? 0);
  }
  if (path === "/api/events") {
    if (hub.stream !== 200) return respond(response, path, hub.stream);
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.write("retry: 300\n\n");
    streams.add(response);
    response.on("close", () => streams.delete(response));
    return hub.isSending && send(response);
  }
  const file = path === "/" ? "/index.html" : path;
  response.writeHead(200, { "content-type": TYPES[extname(file)] });
  return response.end(readFileSync(join(ASSETS, file)));
}

async function until(description, holds) {
  for (const end = Date.now() + TIMEOUT_MS; !(await holds());) {
    assert.ok(Date.now() < end, `timed out: ${description}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

// Waits for some snapshots more.
async function snapshots(number) {
  const last = sent + number;
  await until("snapshots", () => sent >= last);
}

const endStreams = () => streams.forEach((stream) => stream.end());
const shows = (page, selector, pattern) => until(`${pattern} in ${selector}`, async () => pattern.test((await page.textContent(selector)) ?? ""));
const alerts = (page) => page.locator("main [role=alert]").count();

const CASES = {
  "a region has the colour that the hub sends": async (page, open) => {
    await open("/");
    const dot = page.locator(`.mark[data-region="${EUROPE}"] .dot`);
    const fill = () => dot.evaluate((element) => getComputedStyle(element).fill);
    await page.emulateMedia({ colorScheme: "light" });
    assert.equal(await fill(), "rgb(185, 117, 0)");
    await page.emulateMedia({ colorScheme: "dark" });
    assert.equal(await fill(), "rgb(208, 134, 11)");
  },
  "a region with one lost gateway of two is not marked, and an old event has its date": async (page, open) => {
    await open("/");
    await page.waitForSelector(".map .gateway");
    assert.equal(await page.locator(".map .gateway.lost").count(), 0);
    assert.equal(await page.textContent(".events time"), "3 days ago");
    assert.match(await page.getAttribute(".events time", "title"), /\d{4}, \d\d:\d\d:\d\d$/);
  },
  "the skip link keeps the page": async (page, open) => {
    await open("/#/regions");
    await page.waitForSelector("tbody");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    await snapshots(2);
    assert.equal(await page.textContent("main h1"), "Regions");
    assert.equal(await page.evaluate(() => document.activeElement.id), "content");
  },
  "an address that is malformed or unknown shows a page": async (page, open) => {
    await open("/#/requests/%E0%A4%A");
    await shows(page, "main h1", /^Requests$/);
    await open("/#/nothing");
    await shows(page, "main h1", /^Not found$/);
  },
  "a link keeps the focus while the order of the rates changes": async (page, open) => {
    await open("/#/deployments");
    const link = page.locator("tbody a", { hasText: "b" });
    await link.focus();
    await snapshots(3);
    assert.ok(await link.evaluate((element) => element === document.activeElement));
  },
  "a response to an earlier lookup does not replace a later one": async (page, open) => {
    hub.lookupMs = { slow: 1000 };
    await open("/#/requests/slow");
    await until("first lookup", () => hub.lookups === 1);
    await page.evaluate(() => { location.hash = "#/requests/fast"; });
    await shows(page, "main [role=alert]", /fast/);
    await snapshots(5);
    await shows(page, "main [role=alert]", /fast/);
  },
  "a hub that is overloaded does not sign the person out": async (page, open) => {
    hub.session = 503;
    await open("/");
    await shows(page, "main", /error 503/);
    assert.equal(await page.locator(".signin").count(), 0);
    hub.session = 200;
    await page.waitForSelector(".map");
  },
  "the end of a session shows how to sign in": async (page, open) => {
    await open("/");
    await page.waitForSelector(".map");
    Object.assign(hub, { session: 401, stream: 401 });
    endStreams();
    await page.waitForSelector(".signin");
    assert.equal(await alerts(page), 0);
  },
  "a used link says so": async (page, open) => {
    hub.login = 401;
    await open("/#login=ab");
    await shows(page, ".signin [role=alert]", /error 401/);
    assert.ok(!page.url().includes("login"));
  },
  "a rejected stream is shown until it is accepted": async (page, open) => {
    hub.stream = 429;
    await open("/");
    await shows(page, "main [role=alert]", /error 429/);
    hub.stream = 200;
    await page.waitForSelector(".map");
    await until("no message", async () => (await alerts(page)) === 0);
  },
  "a silent hub is not live": async (page, open) => {
    await open("/");
    await shows(page, "#status", /live/);
    hub.isSending = false;
    await shows(page, "#status", /reconnecting, as of \d\d:/);
    hub.isSending = true;
    await shows(page, "#status", /live/);
  },
  "the charts have what happened while the stream was interrupted": async (page, open) => {
    await open("/");
    await page.waitForSelector(".map");
    const before = hub.histories;
    endStreams();
    await until("history", () => hub.histories > before);
  },
  "the message of a failed action ends with the next one": async (page, open) => {
    page.on("dialog", (dialog) => dialog.accept());
    hub.drain = 500;
    await open("/#/regions");
    await page.click(`button[data-action=drain][data-region="${EUROPE}"]`);
    await shows(page, "main [role=alert]", /error 500/);
    hub.drain = 200;
    await page.click(`button[data-action=drain][data-region="${EUROPE}"]`);
    await until("no message", async () => (await alerts(page)) === 0);
  },
  "a sign-out that fails says so": async (page, open) => {
    hub.logout = 500;
    await open("/");
    await page.click("[data-action=logout]");
    await shows(page, "main [role=alert]", /still signed in/);
  },
  "the first change after a restart of the hub is read aloud, and old ones are not": async (page, open) => {
    hub.event = 500;
    await open("/");
    await page.waitForSelector(".map");
    hub.event = 1;
    await snapshots(2);
    assert.equal(await page.textContent("#announcer"), "");
    hub.event = 2;
    await shows(page, "#announcer", /is down/);
  },
  "a search sends only its conditions, and says what is missing": async (page, open) => {
    hub.found = [{ gateway: AMERICA, id: null, at_ms: Date.now(), kept: "failed", tenant: "docs", deployment: "constructor", region: null, status: 503, outcome: "overloaded", total_ms: 5, attempts: [AMERICA, EUROPE] }];
    await open("/#/requests");
    await page.fill("#search-tenant", " docs ");
    await page.click(".filters button");
    await shows(page, ".found", /withheld/);
    const [query] = hub.searches;
    const parameters = new URL(query, "http://hub").searchParams;
    assert.deepEqual([...parameters.keys()].sort(), ["since_ms", "tenant"]);
    assert.equal(parameters.get("tenant"), "docs");
    const text = await page.textContent("main");
    for (const part of [`No response from gateways in ${EUROPE}`, "[explanations] is missing", "narrow the search"]) assert.ok(text.includes(part), part);
    // The form keeps what was written while snapshots arrive.
    await snapshots(2);
    assert.equal(await page.inputValue("#search-tenant"), " docs ");
  },
  "a search pages backwards in time": async (page, open) => {
    await open("/#/requests");
    await page.selectOption("#search-period", "15");
    await page.fill("#search-until", "2026-11-26T08:00:07");
    await page.click(".filters button");
    await until("search", () => hub.searches.length === 1);
    const parameters = new URL(hub.searches[0], "http://hub").searchParams;
    // The second itself is included.
    const end = await page.evaluate(() => Date.parse("2026-11-26T08:00:08"));
    assert.deepEqual([...parameters.entries()].sort(), [["since_ms", `${end - 900_000}`], ["until_ms", `${end}`]]);
  },
  "an incomplete search without requests says so, and why": async (page, open) => {
    hub.problems = [{ gateway: AMERICA, problem: "the disk failed" }];
    await open("/#/requests");
    await page.click(".filters button");
    await shows(page, "main", /not all were searched/);
    const text = await page.textContent("main");
    assert.ok(text.includes(`A gateway in ${AMERICA}: the disk failed.`) && !text.includes("0 requests"), text);
  },
  "two requests with the same id and reasons of a newer version are listed": async (page, open) => {
    const request = { gateway: AMERICA, id: "one", at_ms: Date.now(), kept: "constructor", tenant: null, deployment: null, region: null, status: 503, outcome: "overloaded", total_ms: 5, attempts: [] };
    hub.found = [request, { ...request, total_ms: 6 }, { ...request, total_ms: 7 }];
    await open("/#/requests");
    await page.click(".filters button");
    await page.waitForSelector(".found");
    await snapshots(3);
    assert.deepEqual(await page.locator(".found tbody td:nth-child(6)").allTextContents(), ["5 ms", "6 ms", "7 ms"]);
    assert.equal(await page.locator(".found tbody td:nth-child(3)").first().textContent(), "constructor");
  },
  "a response to an earlier search does not replace a later one": async (page, open) => {
    Object.assign(hub, { searchMs: 1000, search: 400 });
    await open("/#/requests");
    await page.click(".filters button");
    await until("first search", () => hub.searches.length === 1);
    await page.fill("#search-tenant", "later");
    await page.click(".filters button");
    await shows(page, "main [role=alert]", /later/);
    await snapshots(5);
    await shows(page, "main [role=alert]", /later/);
  },
  "a hub outside a local fleet says why no drill can be started": async (page, open) => {
    await open("/#/drills");
    await shows(page, "main", /not here/);
    hub.drills = 500;
    await shows(page, "main [role=alert]", /error 500/);
  },
  "an arc has its rate and median latency as a label, as its name and under the pointer": async (page, open) => {
    hub.arcs = [arc(EUROPE, 12, 34)];
    await open("/");
    await shows(page, ".map .arclabel", /^12\/s · 34 ms$/);
    const found = page.getByRole("img", { name: `Gateway ${AMERICA} to region ${EUROPE}: 12 requests/s, p50 34 ms, round trip 8 ms` });
    assert.equal(await found.count(), 1);
    await page.hover(".map .arclabel", { force: true });
    await shows(page, ".mapdetail", /: 12 requests\/s, p50 34 ms/);
    // The description has the newest values.
    hub.arcs = [arc(EUROPE, 15, 40)];
    await shows(page, ".mapdetail", /: 15 requests\/s, p50 40 ms/);
    await page.mouse.move(0, 0);
    await shows(page, ".mapdetail", /^Point at/);
  },
  "labels of arcs cover neither each other nor regions": async (page, open) => {
    const ids = Array.from({ length: 24 }, (_, at) => `test/region-${at}`);
    hub.regions = [region(AMERICA, 0), ...ids.map((id, at) => ({ ...region(id, 0), city: `Region ${at}`, lat: 58 - 13 * (at % 8), lon: -125 + 11.3 * at }))];
    hub.arcs = ids.map((id, at) => arc(id, 1 + at, 10 * at));
    await open("/");
    await page.waitForSelector(".map .arclabel", { state: "attached" });
    const overlapping = await page.evaluate(() => {
      const boxes = [...document.querySelectorAll(".arclabel, .city")].map((text) => ({ text: text.textContent, isLabel: text.matches(".arclabel"), box: text.getBoundingClientRect() }));
      const overlaps = ({ box: a }, { box: b }) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      return boxes.flatMap((one, at) => boxes.slice(at + 1).filter((other) => (one.isLabel || other.isLabel) && overlaps(one, other)).map((other) => `${one.text} and ${other.text}`));
    });
    assert.deepEqual(overlapping, []);
    const count = await page.locator(".arclabel").count();
    assert.ok(count >= 5, `${count} labels`);
  },
  "a spillover is shown on the map for seconds, apart from a failover, and stays in the events": async (page, open) => {
    hub.moves = [move("spillover", 7, 0)];
    await open("/");
    await page.waitForSelector(`.move.spillover[data-from="${AMERICA}"][data-to="${EUROPE}"]`, { state: "attached" });
    assert.equal(await page.locator(".move.failover").count(), 0);
    assert.equal(await page.getByRole("img", { name: `Spillover from ${AMERICA} to ${EUROPE}: 12 requests` }).count(), 1);
    const dashes = () => page.locator(".move path").first().evaluate((path) => getComputedStyle(path).strokeDasharray);
    assert.notEqual(await dashes(), "none", "not by its colour alone");
    await shows(page, ".events li[data-kind=spillover]", /12 requests spilled over from aws\/us-east-1 to gcp\/europe-west4/);
    hub.moves = [move("failover", 8, 0), move("spillover", 7, 7000)];
    await page.waitForSelector(".move.failover", { state: "attached" });
    assert.equal(await page.locator(".move.spillover").count(), 0, "a spillover that has ended");
    assert.equal(await dashes(), "none");
    assert.equal(await page.locator(".events li[data-kind=spillover]").count(), 1);
  },
  "the residency zone of the address is marked on the map by a ring and its name": async (page, open) => {
    const marked = () => page.locator(".mark[data-zone]").evaluateAll((marks) => marks.map((mark) => [mark.dataset.region, mark.querySelectorAll(".zonering").length, mark.querySelector(".city").textContent]));
    await open("/#/?zone=eu");
    await page.waitForSelector(".map");
    assert.equal(await page.inputValue("#map-zone"), "eu");
    assert.deepEqual(await marked(), [[EUROPE, 1, `${EUROPE} · eu`]]);
    await shows(page, ".zones output", /^1 region of 2: /);
    assert.match(await page.getAttribute(`.mark[data-region="${EUROPE}"]`, "aria-label"), /zones nl, eu$/);
    await page.selectOption("#map-zone", "us");
    await until("address", () => page.url().endsWith("/#/?zone=us"));
    await shows(page, `.mark[data-region="${AMERICA}"] .city`, / · us$/);
    assert.equal((await marked()).length, 1);
    await page.reload();
    await shows(page, `.mark[data-region="${AMERICA}"] .city`, / · us$/);
    // A link to another zone changes the control too.
    await page.evaluate(() => { location.hash = "#/"; });
    await until("no zone", async () => (await marked()).length === 0 && (await page.inputValue("#map-zone")) === "");
    for (const [address, text] of [["/#/?zone=zz", /^No region is in zz\.$/], ["/#/?zone=%3Cb%3E", /^$/]]) {
      await open(address);
      await shows(page, ".zones output", text);
      assert.equal((await marked()).length, 0);
    }
  },
  "the keyboard alone reads the map, changes pages and filters, drains a region, and starts and stops a drill": async (page, open) => {
    page.on("dialog", (dialog) => dialog.accept());
    Object.assign(hub, { hasDrills: true, arcs: [arc(EUROPE, 12, 34)] });
    await open("/");
    await page.waitForSelector(".map");
    const visit = async (title) => {
      await tabTo(page, `nav a[href="#/${title.toLowerCase()}"]`, "Shift+Tab");
      await page.keyboard.press("Enter");
      await shows(page, "main h1", new RegExp(`^${title}$`));
      assert.ok(await hasFocus(page, "main"), "the focus is on the new page");
    };
    // A zone, and the map, which is one stop of the Tab key.
    await tabTo(page, "#map-zone");
    await page.keyboard.type("eu");
    await page.waitForSelector(".zonering", { state: "attached" });
    assert.ok(await hasFocus(page, "#map-zone"), "the focus stays");
    await tabTo(page, ".mark");
    await shows(page, ".mapdetail", new RegExp(`^Region ${AMERICA}`));
    await page.keyboard.press("ArrowRight");
    await shows(page, ".mapdetail", new RegExp(`^Region ${EUROPE}.*zones nl, eu$`));
    await page.keyboard.press("End");
    await shows(page, ".mapdetail", new RegExp(`^Gateway ${AMERICA} to region ${EUROPE}: 12 requests/s, p50 34 ms`));
    await snapshots(2);
    assert.ok(await hasFocus(page, ".arc"), "the focus stays while snapshots arrive");
    await page.keyboard.press("Shift+Tab");
    assert.ok(await hasFocus(page, "#map-zone"), "one stop");
    await page.keyboard.press("Tab");
    assert.ok(await hasFocus(page, ".arc"), "Tab returns to the same element");
    await page.keyboard.press("Tab");
    assert.ok(!(await hasFocus(page, ".map *")), "Tab leaves the map");
    await visit("Regions");
    await tabTo(page, `button[data-action=drain][data-region="${EUROPE}"]`);
    await page.keyboard.press("Enter");
    await page.waitForSelector(`button[data-action=undrain][data-region="${EUROPE}"]`);
    assert.ok(await hasFocus(page, "button[data-action=undrain]"), "the focus stays on the button");
    await page.keyboard.press("Space");
    await page.waitForSelector(`button[data-action=drain][data-region="${EUROPE}"]`);
    await visit("Requests");
    await tabTo(page, "#search-kept");
    await page.keyboard.type("failed o");
    await tabTo(page, "#search-tenant");
    await page.keyboard.type("docs");
    await tabTo(page, ".filters button");
    await page.keyboard.press("Enter");
    await until("search", () => hub.searches.length === 1);
    const parameters = new URL(hub.searches[0], "http://hub").searchParams;
    assert.deepEqual([parameters.get("kept"), parameters.get("tenant")], ["failed_over", "docs"]);
    await visit("Drills");
    await tabTo(page, "button[data-drill=short]");
    await page.keyboard.press("Enter");
    await page.waitForSelector("[data-key=run][data-state=running]");
    await tabTo(page, "button[data-action=stopDrill]", "Shift+Tab");
    await page.keyboard.press("Enter");
    await page.waitForSelector("[data-key=run][data-state=stopped]");
    assert.deepEqual(hub.changes, [`PUT /api/drains/${EUROPE}`, `DELETE /api/drains/${EUROPE}`, "POST /api/drills/short", "DELETE /api/drills"]);
  },
  "an explained request has the time at the spoke, and the id of its trace": async (page, open) => {
    const attempt = { attempt: 1, began_ms: 1, cause: "first", end: "ok", instance: "spoke-1", region: EUROPE, status: 200, took_ms: 108 };
    hub.explanation = { id: "one", outcome: "ok", status: 200, at_ms: Date.now(), total_ms: 110, endpoint: "/v1/embeddings", region: EUROPE, regions: [], attempts: [attempt], routing: { began_ms: 0.5, took_ms: 0.5 }, trace_id: "0af7651916cd43dd8448eb211c80319c",
      times: { to_head_ms: 109, gateway_ms: 1, network_ms: 50, queue_ms: 20, tokenize_ms: 1, engine_ms: 7 } };
    await open("/#/requests/one");
    await shows(page, ".waterfall", /Spoke and transfer/);
    await page.click("main details summary");
    // 108 ms of waiting without the network are 58 ms in the region, of which the replica reports 28 ms.
    assert.match(await page.textContent("[data-key='1-spoke_ms']:is(tr)"), /30 ms/);
    assert.equal(await page.textContent(".trace code"), hub.explanation.trace_id);
    hub.explanation = { ...hub.explanation, id: "two", trace_id: null, times: null };
    await open("/#/requests/two");
    await shows(page, ".trace", /has no trace/);
    assert.ok(!(await page.textContent(".waterfall")).includes("Spoke"), "times that are not known");
  },
  "counts that round up have the next unit": async (page, open) => {
    await open("/");
    const counts = await page.evaluate(async () => { const { count } = await import("/dom.js"); return [9999, 12_345, 999_949, 999.6e6, 1e12].map(count); });
    assert.deepEqual(counts, ["9,999", "12.3 k", "1.00 M", "1.00 G", "1.00 T"]);
  },
};

const server = createServer(serve);
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const sending = setInterval(() => hub.isSending && streams.forEach(send), PERIOD_MS);
const origin = `http://127.0.0.1:${server.address().port}`;
const executablePath = execFileSync("which", [BROWSER], { encoding: "utf8" }).trim();
// The sandbox of the browser needs a user other than root; the page is our own.
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
let failed = 0;
for (const [name, run] of Object.entries(CASES)) {
  Object.assign(hub, USUAL, { searches: [], changes: [], draining: new Set(), run: null, hasDrills: false });
  const context = await browser.newContext({ colorScheme: "light" });
  context.setDefaultTimeout(TIMEOUT_MS);
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(error.message));
  try {
    await run(page, (path) => page.goto(origin + path));
    assert.deepEqual(errors, []);
  } catch (error) {
    failed += 1;
    console.log(`${name}: ${error.message}`);
  }
  await context.close();
}
await browser.close();
clearInterval(sending);
endStreams();
server.close();
process.exitCode = failed ? 1 : 0;
