// Test of the console in a browser. Environment: BROWSER, CONSOLE (link that signs in), CONTROL (control API of the fleet), GATEWAY
// (URL for clients), OPERATIONS (URL of its operations port), IMAGES (folder of the screenshots). Exits with 1 and a message if an expectation does not hold.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { chromium } from "playwright-core";
import { hasFocus, tabTo } from "./keyboard.mjs";

const { BROWSER, CONSOLE, CONTROL, GATEWAY, OPERATIONS, IMAGES } = process.env;
const AXE = readFileSync(new URL("node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
const [EUROPE, AMERICA] = ["gcp/europe-west4", "aws/us-east-1"];
const PLACES = ["50.11,8.68", "39.04,-77.49", "34.69,135.50"];
const PAGES = ["", "?zone=eu", "deployments", "deployments/minilm", "regions", "gateways", "tenants", "rollouts", "drills", "requests"];
const SIZES = { wide: { width: 1280, height: 900 }, narrow: { width: 390, height: 844 } };
// Limits of the page: bytes of its files, and time until it shows the map.
const BYTES_MAX = 300_000, INTERACTIVE_MS_MAX = 5_000;
const SHOWN_MS_MAX = 2_000;

// Callers of three continents, until `stop`.
let stop = false;
async function caller(place, model, number) {
  while (!stop) {
    const headers = { authorization: "Bearer local", "content-type": "application/json", "x-meridian-client-geo": place };
    const body = JSON.stringify({ model, input: `caller ${number}` });
    await fetch(`${GATEWAY}/v1/embeddings`, { method: "POST", headers, body }).then((response) => response.arrayBuffer()).catch(() => {});
    await new Promise((resolve) => setTimeout(resolve, 40));
  }
}

async function control(action) {
  const response = await fetch(`${CONTROL}/${action}`, { method: "POST" });
  assert.equal(response.status, 200, `${action}: ${await response.text()}`);
}

// Checks a page with axe-core. The script is evaluated by the debugger, because the policy of the page forbids it.
async function accessible(context, page, name) {
  const session = await context.newCDPSession(page);
  await session.send("Runtime.evaluate", { expression: AXE });
  const { violations } = await page.evaluate(() => window.axe.run());
  const found = violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`);
  assert.deepEqual(found, [], `accessibility of ${name}`);
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(overflow <= 0, `${name} is ${overflow} px wider than the window`);
}

// Checks a state of a page with axe-core, dark and light, narrow and wide.
async function both(context, page, name) {
  for (const colorScheme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme });
    for (const size of ["narrow", "wide"]) {
      await page.setViewportSize(SIZES[size]);
      await accessible(context, page, `${name}, ${colorScheme}, ${size}`);
    }
  }
}

async function shown(page, selector, milliseconds, what) {
  await page.waitForSelector(selector, { state: "attached", timeout: milliseconds }).catch(() => assert.fail(`${what}: no ${selector} within ${milliseconds} ms`));
}

// Requests per second that the map shows to all regions but this one.
const others = (region) => [...document.querySelectorAll(".arc")].filter((arc) => arc.dataset.to !== region).reduce((sum, arc) => sum + Number(arc.dataset.rate), 0);

const executablePath = execFileSync("which", [BROWSER], { encoding: "utf8" }).trim();
// The sandbox of the browser needs a user other than root; the pages are our own.
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const callers = PLACES.flatMap((place, at) => [0, 1, 2].map((number) => caller(place, number === 2 ? "minilm-eu" : "minilm", at * 3 + number)));
// A failover is a request that was in flight to the lost region. Of two callers, neither has one in a tenth of the time.
callers.push(...[9, 10, 11, 12].map((number) => caller(PLACES[0], "minilm", number)));
try {
  const origin = new URL(CONSOLE).origin;
  const context = await browser.newContext({ viewport: SIZES.wide, colorScheme: "light" });
  const page = await context.newPage();
  const problems = [];
  page.on("pageerror", (error) => problems.push(error.message));
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  page.on("request", (request) => new URL(request.url()).origin !== origin && problems.push(`request to ${request.url()}`));

  // Without a session the page has no data.
  const stranger = await browser.newContext();
  const closed = await stranger.newPage();
  await closed.goto(origin);
  await shown(closed, ".signin", 5_000, "sign-in page");
  assert.equal((await stranger.request.get(`${origin}/api/history`)).status(), 401);
  await accessible(stranger, closed, "sign-in page");
  await stranger.close();

  const begun = Date.now();
  await page.goto(CONSOLE);
  await shown(page, ".map .arc.busy", INTERACTIVE_MS_MAX, "map");
  const bytes = await page.evaluate(() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")].filter(({ name }) => !name.includes("/api/")).reduce((sum, { encodedBodySize }) => sum + encodedBodySize, 0));
  console.log(`page: ${bytes} bytes, map after ${Date.now() - begun} ms`);
  assert.ok(bytes > 10_000 && bytes < BYTES_MAX, `${bytes} bytes`);
  assert.ok(!page.url().includes("login"), "the secret of the link is not kept in the address");
  assert.equal(await page.evaluate(() => document.cookie), "", "scripts cannot read the session");

  // The link was for one use.
  const other = await browser.newContext();
  const again = await other.newPage();
  await again.goto(CONSOLE);
  await shown(again, ".signin [role=alert]", 5_000, "used link");
  await other.close();

  // A request that changes something needs the header of the page.
  const forged = await context.request.put(`${origin}/api/drains/${AMERICA}`, { headers: { origin } });
  assert.equal(forged.status(), 403);
  const foreign = await context.request.put(`${origin}/api/drains/${AMERICA}`, { headers: { origin: "http://evil.example", "x-meridian-console": "1" } });
  assert.equal(foreign.status(), 403);

  // Each page, light and dark, wide and narrow.
  await page.waitForFunction((region) => Number(document.querySelector(`.arc[data-to="${region}"]`)?.dataset.rate) > 1, EUROPE, { timeout: 15_000 });
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    for (const [size, viewport] of Object.entries(SIZES)) {
      await page.setViewportSize(viewport);
      for (const name of PAGES) {
        await page.goto(`${origin}/#/${name}`);
        await shown(page, "main h1", 5_000, name);
        await accessible(context, page, `${name || "overview"}, ${colorScheme}, ${size}`);
      }
    }
  }

  // The map shows latencies, and the residency zone of the address.
  await page.setViewportSize(SIZES.wide);
  await page.goto(`${origin}/#/?zone=eu`);
  await page.waitForFunction(() => [...document.querySelectorAll(".map .arclabel")].some((label) => /\/s · [\d,.]+ m?s$/.test(label.textContent)), null, { timeout: 15_000 });
  await shown(page, `.mark[data-region="${EUROPE}"] .zonering`, 5_000, "region of the zone");
  assert.equal(await page.locator(".zonering").count(), 1);

  // A region is lost.
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize(SIZES.wide);
  await page.goto(`${origin}/#/`);
  await shown(page, `.arc.busy[data-to="${EUROPE}"]`, 5_000, "traffic to Europe");
  const before = await page.evaluate(others, EUROPE);
  const killed = Date.now();
  const killing = control(`kill?process=${encodeURIComponent(`spoke ${EUROPE}`)}`);
  await shown(page, `.mark[data-region="${EUROPE}"]:not([data-state="healthy"])`, SHOWN_MS_MAX, "killed region on the map");
  await shown(page, `.arc[data-to="${EUROPE}"]:not([data-health="healthy"])`, SHOWN_MS_MAX - (Date.now() - killed), "arc to the killed region");
  const downMs = Date.now() - killed;
  await shown(page, `.move.failover[data-from="${EUROPE}"]`, SHOWN_MS_MAX - downMs, "failover on the map");
  const movedMs = Date.now() - killed;
  assert.ok(movedMs <= SHOWN_MS_MAX, `${movedMs} ms`);
  const failover = await page.getAttribute(`.move.failover[data-from="${EUROPE}"]`, "aria-label");
  console.log(`region lost on the map after ${downMs} ms, failover after ${movedMs} ms: ${failover}`);
  await killing;
  await shown(page, `.mark[data-region="${EUROPE}"][data-state="down"]`, 10_000, "region that is down");
  const isMoved = async () => (await page.evaluate(others, EUROPE)) > before * 1.2;
  for (const until = Date.now() + 10_000; !(await isMoved());) {
    assert.ok(Date.now() < until, "the other regions take the traffic");
    await page.waitForTimeout(100);
  }
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    for (const [size, viewport] of Object.entries(SIZES)) {
      await page.setViewportSize(viewport);
      await page.screenshot({ path: join(IMAGES, `console-${colorScheme}-${size}.png`) });
    }
  }

  // A request that failed over is found, with both attempts.
  await page.setViewportSize(SIZES.wide);
  await page.emulateMedia({ colorScheme: "light" });
  const id = await page.evaluate(() => decodeURIComponent(document.querySelector(".events li[data-kind=failover] a").hash.split("/").pop()));
  await page.goto(`${origin}/#/requests`);
  await page.fill("#request-id", id);
  await page.press("#request-id", "Enter");
  await shown(page, ".waterfall .span", 8_000, "explanation");
  const attempts = await page.locator(".waterfall > g.attempt").count();
  assert.ok(attempts >= 2, `${attempts} attempts of ${id}`);
  const decision = await page.locator("main").innerText();
  for (const part of [EUROPE, "Routing decision", "minilm"]) assert.ok(decision.includes(part), `${part} in ${decision}`);
  for (const stage of ["Admission", "Routing decision", "Engine"]) assert.ok((await page.locator(".waterfall").innerHTML()).includes(stage), `${stage} in the waterfall`);
  await page.click("main details summary");
  await shown(page, "main details[open] tbody tr", 1_000, "stages as a table");
  await both(context, page, "explained request");
  await page.click("main details summary");
  await page.screenshot({ path: join(IMAGES, "console-request.png") });

  // Failed-over requests are found by a search after the ring has forgotten them, and are explained from disk.
  await page.goto(`${origin}/#/requests`);
  await page.selectOption("#search-kept", "failed_over");
  await page.selectOption("#search-region", EUROPE);
  await page.waitForTimeout(2_500);
  await page.click(".filters button");
  await shown(page, ".found tr[data-kept=failed_over] a", 10_000, "found requests");
  await both(context, page, "found requests");
  await page.screenshot({ path: join(IMAGES, "console-search.png") });
  const oldest = page.locator(".found tbody tr a").last();
  const kept = await oldest.innerText();
  // More requests than the ring has, which are answered at once.
  const flood = async (number) => { for (let at = 0; at < number; at++) await fetch(`${GATEWAY}/v1/models`).then((response) => response.arrayBuffer()); };
  await Promise.all(Array.from({ length: 16 }, () => flood(280)));
  const onDisk = await (await fetch(`${OPERATIONS}/explain/${encodeURIComponent(kept)}`)).json();
  assert.ok(["failed_over", "failed"].includes(onDisk.kept), `${kept} is explained from disk: ${JSON.stringify(onDisk).slice(0, 200)}`);
  await oldest.click();
  await shown(page, ".waterfall > g.attempt ~ g.attempt", 10_000, "explanation from disk");
  assert.ok((await page.locator(".waterfall > g.attempt").count()) >= 2, `attempts of ${kept}`);
  await page.goto(`${origin}/#/requests`);
  await page.fill("#search-status", "99");
  await page.click(".filters button");
  await shown(page, "main [role=alert]", 5_000, "invalid status");
  await page.goto(`${origin}/#/requests/no-such-request`);
  await shown(page, "main [role=alert]", 8_000, "unknown request");

  // The keyboard reaches the content and the pages.
  await page.goto(`${origin}/#/`);
  await page.reload();
  await shown(page, ".map", 5_000, "map after a reload");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.className), "skip");

  // The region returns.
  await control(`start?process=${encodeURIComponent(`spoke ${EUROPE}`)}`);
  await shown(page, `.mark[data-region="${EUROPE}"][data-state="healthy"]`, 30_000, "region that has returned");

  // An operator drains a region on its page, with the keyboard.
  page.on("dialog", (dialog) => dialog.accept());
  await tabTo(page, 'nav a[href="#/regions"]');
  await page.keyboard.press("Enter");
  await tabTo(page, `button[data-action=drain][data-region="${AMERICA}"]`);
  await page.keyboard.press("Enter");
  await shown(page, `button[data-action=undrain][data-region="${AMERICA}"]`, 10_000, "drained region");
  assert.ok(await hasFocus(page, "button[data-action=undrain]"), "the focus stays on the button");
  await page.keyboard.press("Enter");
  await shown(page, `button[data-action=drain][data-region="${AMERICA}"]`, 10_000, "end of the drain");

  // An operator runs a drill, and watches it.
  await page.goto(`${origin}/#/drills`);
  await shown(page, "button[data-drill=short]", 5_000, "drill");
  assert.ok((await page.locator(".drills").innerText()).includes("--store etcd"), "a drill names the fleet that it needs");
  const unsent = await context.request.post(`${origin}/api/drills/short`, { headers: { origin } });
  assert.equal(unsent.status(), 403);
  await page.click("button[data-drill=short]");
  await shown(page, "[data-key=run][data-state=running]", 5_000, "drill that runs");
  assert.ok(await page.locator("button[data-drill=short]").isDisabled(), "one drill at a time");
  await shown(page, ".drillevents li.bad", 10_000, "action of the drill");
  await both(context, page, "drill that runs");
  await page.screenshot({ path: join(IMAGES, "console-drill.png") });
  await shown(page, "[data-key=run][data-state=held]", 60_000, "verdict").catch(async (error) => { throw new Error(`${error.message}: ${await page.locator("main").innerText()}`); });
  assert.equal(await page.locator("tr[data-state=held]").count(), 2);
  await both(context, page, "drill that has ended");
  // A drill that is stopped leaves the fleet as it was.
  await page.click("button[data-drill=short]");
  await shown(page, "[data-key=run][data-state=running]", 5_000, "second run");
  await shown(page, ".drillevents li.bad", 15_000, "action of the second run");
  await page.click("button[data-action=stopDrill]");
  await shown(page, "[data-key=run][data-state=stopped]", 60_000, "stopped drill");
  await page.goto(`${origin}/#/`);
  await shown(page, `.mark[data-region="${EUROPE}"][data-state="healthy"]`, 30_000, "region after the stopped drill");

  await page.click("button[data-action=logout]");
  await shown(page, ".signin", 5_000, "signed out");
  const expected = problems.filter((problem) => !/status of (400|401|403|404|429|504)/.test(problem));
  assert.deepEqual(expected, [], "errors of the page");
} finally {
  stop = true;
  await Promise.all(callers);
  await browser.close();
}
