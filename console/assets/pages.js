// Pages of the console. Each is a function of the state.

import { ago, badge, bar, byName, clock, colour, columns as head, count, h, ms, rate, regionName, s } from "./dom.js";
import { lines, spark, stacked } from "./charts.js";
import { map, mapDetail, mapTable } from "./map.js";
import { requests } from "./requests.js";
import { drills } from "./drills.js";
import { zoneControl } from "./zones.js";

const CAUSES = {
  evacuation: "the region is down", retry: "the attempt failed", first_byte_timeout: "no response in time", spillover: "the nearest region is busy",
  other: "for a reason that this version of the hub does not know",
};

const stateBadge = (region) => {
  if (region.state === "down") return badge("down", "bad");
  if (region.draining) return badge("draining", "warn");
  return badge(region.state, region.state === "healthy" ? "good" : "warn");
};

function table(label, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("caption", { class: "hidden" }, label),
      head(columns), h("tbody", {}, rows)));
}

const card = (title, ...content) => h("section", { class: "card" }, h("h2", {}, title), content);

const heading = (title, text) => h("div", { class: "heading" }, h("h1", {}, title), text && h("p", { class: "soft" }, text));

const residency = (policy) => (policy === "anywhere" ? badge("anywhere") : badge(policy, "zone"));

// Ready replicas of those that are wanted.
const replicas = (ready, target) => h("span", { class: "replicas" },
  bar(target ? ready / target : ready ? 1 : 0, `${ready} of ${target} replicas ready`, ready < target ? "warn" : "good"), h("span", {}, `${ready}/${target}`));

function eventText(event) {
  const requests = `${count(event.requests)} request${event.requests === 1 ? "" : "s"}`;
  switch (event.kind) {
    case "failover": return [requests, " failed over from ", regionName(event.subject), " to ", regionName(event.to), `: ${CAUSES[event.cause] ?? event.cause}`];
    case "spillover": return [requests, " spilled over from ", regionName(event.subject), " to ", regionName(event.to)];
    case "health": return [regionName(event.subject), ` is ${event.to}`, event.cause !== "unknown" && h("span", { class: "soft" }, ` (was ${event.cause})`)];
    case "drain": return [regionName(event.subject), ` is ${event.to}`];
    case "gateway": return [`Gateway in ${event.subject} is ${event.to}`];
    default: return [event.subject, ` is served with model revision ${event.to}`];
  }
}

const eventKind = (event) => (event.kind === "failover" || event.to === "down" || event.to === "lost" ? "bad" : event.to === "healthy" || event.to === "in service" || event.to === "reporting" ? "good" : "warn");

const since = ({ at_ms, last_ms }) => (last_ms - at_ms < 1000 ? clock(at_ms) : `${clock(at_ms)} to ${clock(last_ms)}`);

function events(snapshot) {
  if (!snapshot.events.length) return h("p", { class: "empty" }, "Nothing has happened since this hub started.");
  return h("ol", { class: "events", tabindex: "0", "aria-label": "Events, the latest first" }, snapshot.events.map((event) =>
    h("li", { class: eventKind(event), "data-key": event.number, "data-kind": event.kind },
      h("time", { datetime: new Date(event.last_ms).toISOString(), title: since(event) }, ago(event.last_ms, snapshot.at_ms)),
      h("span", {}, eventText(event), event.example && [" ", h("a", { href: `#/requests/${encodeURIComponent(event.example)}` }, "explain", h("span", { class: "hidden" }, ` request ${event.example}`))]))));
}

const column = (samples, index) => samples.map((sample) => sample[index]);

function tile(label, value, unit, chart, kind) {
  return h("div", { class: `tile ${kind ?? ""}` }, h("dt", {}, label), h("dd", {}, h("strong", {}, value, unit && h("span", { class: "soft" }, ` ${unit}`)), chart));
}

function tiles({ snapshot, history }) {
  const recent = history.total.slice(-120);
  const healthy = snapshot.regions.filter((region) => region.state === "healthy").length;
  const lost = snapshot.gateways.filter((gateway) => gateway.lost).length;
  // A fleet without any is not well either.
  const allHealthy = healthy > 0 && healthy === snapshot.regions.length, allReport = snapshot.gateways.length > 0 && lost === 0;
  return h("dl", { class: "tiles" },
    tile("Requests", rate(snapshot.total.rate), "/s", spark(column(recent, 0), "Requests per second over two minutes")),
    tile("Failed", rate(snapshot.total.failed), "/s", spark(column(recent, 1), "Failed requests per second over two minutes", "badink"), snapshot.total.failed ? "bad" : ""),
    tile("p50", ms(snapshot.total.p50_ms), "", spark(column(recent, 2), "Median latency over two minutes")),
    tile("p99", ms(snapshot.total.p99_ms), "", spark(column(recent, 3), "99th percentile of the latency over two minutes")),
    tile("Regions healthy", `${healthy}/${snapshot.regions.length}`, "", bar(healthy / Math.max(1, snapshot.regions.length), `${healthy} of ${snapshot.regions.length} regions healthy`, allHealthy ? "good" : "warn"), allHealthy ? "" : "warn"),
    tile("Gateways", `${snapshot.gateways.length - lost}`, lost ? `${lost} lost` : "", bar(snapshot.gateways.length ? (snapshot.gateways.length - lost) / snapshot.gateways.length : 0, `${lost} gateways lost`, allReport ? "good" : "warn"), allReport ? "" : "warn"));
}

const bySeries = (series) => Object.entries(series).sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, values]) => ({ name, values, cls: colour(name) }));

const latencies = (samples, title = "Latency") => lines({ title, unit: "ms", series: [{ name: "p50", values: column(samples, 2), cls: "ink" }, { name: "p99", values: column(samples, 3), cls: "accent" }] });

// Symbols of the map other than the colours of the regions.
function mapSymbols(zone) {
  const symbol = (cls, d, text) => h("li", {}, s("svg", { class: "swatch symbol", viewBox: "0 0 16 10", "aria-hidden": "true" }, s("path", { class: cls, d })), text);
  return [symbol("gatewaymark", "M8 0l5 5l-5 5l-5-5z", "gateway"), symbol("arcmark", "M1 8q7-10 14 0", "requests/s · median latency"),
    symbol("failovermark", "M1 5h14m-4-3l4 3l-4 3", "failover"), symbol("spillovermark", "M1 5h4m2 0h4m2 0h2m-4-3l4 3l-4 3", "spillover"),
    zone && symbol("zonemark", "M8 0.8a4.2 4.2 0 1 1 -0.01 0z", `zone ${zone}`)];
}

function overview(state) {
  const { snapshot, history, zone, inspected } = state;
  return [
    h("h1", { class: "hidden" }, "Overview"),
    tiles(state),
    h("div", { class: "split" },
      h("section", { class: "card mapcard", "aria-label": "World map" }, zoneControl(snapshot, zone), map(snapshot, zone, inspected), mapDetail(snapshot, inspected),
        h("ul", { class: "legend maplegend" }, mapSymbols(zone), snapshot.regions.map((region) => h("li", {}, regionName(region.id)))),
        h("details", {}, h("summary", {}, "Map as a table"), mapTable(snapshot))),
      h("section", { class: "card", "aria-labelledby": "events-title" }, h("h2", { id: "events-title" }, "Events"), events(snapshot))),
    h("div", { class: "halves" },
      h("section", { class: "card" }, stacked({ title: "Requests by region", unit: "/s", series: bySeries(history.regions) })),
      h("section", { class: "card" }, latencies(history.total))),
  ];
}

const failures = (list) => (list.length ? h("span", { class: "failures" }, list.slice(0, 4).map(([outcome, requests]) => badge(`${outcome} ${count(requests)}`, "bad"))) : h("span", { class: "soft" }, "none"));

// Models that a region cannot start, each with the reason.
const failedModels = (serving) => serving.failed.map((failed) => [badge(`${failed.is_next ? "next model failed" : "Failed"}: ${failed.reason}`, failed.is_next ? "warn" : "bad"), " "]);

function deployments({ snapshot, history }) {
  const rows = byName(snapshot.deployments, ({ name }) => name).map((deployment) => {
    const samples = (history.deployments[deployment.name] ?? []).slice(-120);
    return h("tr", { "data-key": deployment.name },
      h("th", { scope: "row" }, h("a", { href: `#/deployments/${encodeURIComponent(deployment.name)}` }, deployment.name)),
      h("td", { class: "left" }, residency(deployment.residency)),
      h("td", { class: "wide" }, h("span", { class: "withspark" }, spark(column(samples, 0), `Requests per second of ${deployment.name}`), rate(deployment.traffic.rate))),
      h("td", {}, ms(deployment.traffic.p50_ms)),
      h("td", { class: "wide" }, h("span", { class: "withspark" }, spark(column(samples, 3), `99th percentile of ${deployment.name}`, "accentink"), ms(deployment.traffic.p99_ms))),
      h("td", {}, count(deployment.pending_tokens)), h("td", {}, deployment.held_ms === null ? "–" : ms(deployment.held_ms)),
      h("td", {}, replicas(deployment.ready, deployment.target)), h("td", { class: "left" }, deployment.regions.flatMap(failedModels).slice(0, 4), failures(deployment.failures)));
  });
  return [heading("Deployments", "Rates of the last seconds; failures of the last minute."),
    h("div", { class: "card flush" }, table("Deployments", ["Deployment", "<Residency", "Requests/s", "p50", "p99", "Queued tokens", "Held for", "Replicas", "<Failures"], rows, "No deployments are applied.")),
    snapshot.deployments_omitted > 0 && h("p", { class: "soft" }, `${snapshot.deployments_omitted} deployments with less traffic are not listed.`)];
}

function deployment({ snapshot, history }, name) {
  const found = snapshot.deployments.find((deployment) => deployment.name === name);
  if (!found) return [heading(name), h("p", { class: "empty" }, "There is no such deployment.")];
  const samples = history.deployments[name] ?? history.total.map(() => [0, 0, 0, 0]);
  const rows = found.regions.map((serving) => h("tr", { "data-key": serving.region },
    h("th", { scope: "row" }, regionName(serving.region)), h("td", {}, replicas(serving.ready, serving.target ?? serving.ready)),
    h("td", { class: "left" }, serving.registered ? badge("routed", "good") : badge("not routed", "warn"), " ", failedModels(serving)), h("td", {}, rate(serving.rate)),
    h("td", {}, count(serving.pending_tokens)), h("td", {}, serving.tokens_per_second ? `${count(serving.tokens_per_second)}/s` : "–"), h("td", {}, serving.held_ms === null ? "–" : ms(serving.held_ms))));
  return [
    h("div", { class: "heading" }, h("p", { class: "soft" }, h("a", { href: "#/deployments" }, "Deployments"), " /"), h("h1", {}, name, " ", residency(found.residency))),
    h("dl", { class: "facts" }, [["Task", found.task], ["Model", found.model], ["Engine", found.engine], ["Placement", found.placement.join(", ") || "all allowed regions"], ["Replicas per region", found.min === found.max ? `${found.min}` : `${found.min} to ${found.max}`]].map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    h("div", { class: "halves" },
      h("section", { class: "card" }, lines({ title: "Requests", unit: "/s", series: [{ name: "all", values: column(samples, 0), cls: "ink" }, { name: "failed", values: column(samples, 1), cls: "badink" }] })),
      h("section", { class: "card" }, latencies(samples))),
    h("div", { class: "card flush" }, table(`Regions of ${name}`, ["Region", "Replicas", "<Route", "Requests/s", "Queued tokens", "Speed", "Held for"], rows, "No region serves it.")),
    found.regions.some((serving) => serving.failed.length) && card("Failed starts", found.regions.flatMap((serving) => serving.failed.map((failed) => h("p", {}, `${serving.region}: ${failed.model}: ${failed.reason}: ${failed.message}`)))),
    card("Failures of the last minute", failures(found.failures)),
  ];
}

function drainButton(region, visitor) {
  if (visitor.role !== "operator") return null;
  return h("button", { type: "button", "data-action": region.draining ? "undrain" : "drain", "data-region": region.id }, region.draining ? "End drain" : "Drain", h("span", { class: "hidden" }, ` ${region.id}`));
}

function regions({ snapshot, history, visitor }) {
  const operator = visitor.role === "operator";
  const rows = snapshot.regions.map((region) => {
    // Seconds of work that are queued: full at one second.
    const queued = region.capacity ? region.pending_tokens / region.capacity : 0;
    return h("tr", { "data-key": region.id },
      h("th", { scope: "row" }, regionName(region.id), h("span", { class: "under soft" }, region.city)), h("td", { class: "left" }, stateBadge(region), !region.registered && [" ", badge("no spoke", "bad")]),
      h("td", { class: "left" }, region.zones.map((zone) => [badge(zone, "zone"), " "])),
      h("td", { class: "wide" }, h("span", { class: "withspark" }, spark((history.regions[region.id] ?? []).slice(-120), `Requests per second of ${region.id}`, colour(region.id)), rate(region.traffic.rate))),
      h("td", {}, ms(region.traffic.p50_ms)), h("td", {}, ms(region.traffic.p99_ms)),
      h("td", {}, h("span", { class: "replicas" }, bar(queued, `${count(region.pending_tokens)} queued tokens`, queued > 0.5 ? "warn" : ""), h("span", {}, count(region.pending_tokens)))),
      h("td", {}, replicas(region.ready, region.target)),
      h("td", { class: "left" }, region.spokes.map(([name]) => h("span", { class: "under nowrap" }, name))),
      operator && h("td", {}, drainButton(region, visitor)));
  });
  const columns = ["Region", "<State", "<Residency zones", "Requests/s", "p50", "p99", "Queued tokens", "Replicas", "<Spokes", ...(operator ? ["Action"] : [])];
  return [heading("Regions", "A drain moves the traffic of a region to other allowed regions, a tenth a second."),
    h("section", { class: "card" }, stacked({ title: "Requests by region", unit: "/s", series: bySeries(history.regions), isWide: true })),
    h("div", { class: "card flush" }, table("Regions", columns, rows, "No region has registered."))];
}

function gateways({ snapshot }) {
  const numbers = new Map();
  for (const { region } of snapshot.gateways) numbers.set(region, (numbers.get(region) ?? 0) + 1);
  const cards = snapshot.gateways.map((gateway) => {
    const furthest = Math.max(1, ...gateway.regions.map((region) => region.rtt_ms));
    const rows = gateway.regions.map((region) => h("tr", { "data-key": region.region },
      h("th", { scope: "row" }, regionName(region.region)), h("td", { class: "left" }, badge(region.health, region.health === "healthy" ? "good" : region.health === "down" ? "bad" : "warn")),
      h("td", {}, h("span", { class: "replicas" }, bar(region.rtt_ms / furthest, `Round trip ${ms(region.rtt_ms)}`), h("span", {}, ms(region.rtt_ms)))),
      h("td", {}, region.report_age_ms === null ? "–" : ms(region.report_age_ms)), h("td", {}, count(region.in_flight))));
    return h("section", { class: "card", "data-key": gateway.boot, "aria-label": `Gateway in ${gateway.region}` },
      h("h2", {}, gateway.region, h("span", { class: "soft" }, ` ${gateway.city} · ${gateway.boot.slice(0, 8)}`)),
      h("p", {}, gateway.lost ? badge("no report", "bad") : badge("reporting", "good"), " ", gateway.current ? badge("current table", "good") : badge(`table ${gateway.generation ?? "none"}`, "warn")),
      numbers.get(gateway.region) > 1 && h("p", { class: "soft" }, `Rates and latencies are those of the ${numbers.get(gateway.region)} gateways of the region.`),
      h("dl", { class: "facts" }, [["Requests", `${rate(gateway.traffic.rate)}/s`], ["Failed", `${rate(gateway.traffic.failed)}/s`], ["p50", ms(gateway.traffic.p50_ms)], ["p99", ms(gateway.traffic.p99_ms)], ["In flight", count(gateway.in_flight)], ["Last report", ms(gateway.age_ms)]].map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
      table(`Regions as seen from ${gateway.region}`, ["Region", "<Health", "Round trip", "Report age", "In flight"], rows, "It has no route table yet."));
  });
  return [heading("Gateways", `Route table ${snapshot.generation}`), cards.length ? h("div", { class: "halves" }, cards) : h("p", { class: "empty" }, "No gateway has reported to this hub.")];
}

function quota(used, limit, unit) {
  if (limit === null) return h("span", { class: "soft" }, "unlimited");
  const share = used / limit;
  return h("span", { class: "replicas" }, bar(share, `${Math.round(share * 100)} % of ${count(limit)} ${unit}`, share > 0.9 ? "bad" : share > 0.7 ? "warn" : "good"), h("span", {}, `${rate(used)} of ${count(limit)}`));
}

function tenants({ snapshot }) {
  const rows = byName(snapshot.tenants, ({ id }) => id).map((tenant) => h("tr", { "data-key": tenant.id },
    h("th", { scope: "row" }, tenant.id), h("td", { class: "left" }, tenant.applied ? residency(tenant.residency) : h("span", { class: "soft" }, "in the file of a gateway")),
    h("td", {}, rate(tenant.rate)), h("td", { class: tenant.failed ? "bad" : "" }, rate(tenant.failed)), h("td", { class: tenant.limited ? "bad" : "" }, rate(tenant.limited)),
    h("td", {}, quota(tenant.rate, tenant.requests_per_second, "requests per second")), h("td", {}, quota(tenant.inputs, tenant.inputs_per_second, "inputs per second")),
    h("td", {}, quota(tenant.tokens * 60, tenant.tokens_per_minute, "tokens per minute")), h("td", {}, tenant.applied ? tenant.weight : "–")));
  return [heading("Tenants and quotas", snapshot.tenants_applied ? "Use of the limits, over all gateways." : "No tenants are applied to the hub, so each gateway uses the limits of its own file."),
    h("div", { class: "card flush" }, table("Tenants and quotas", ["Tenant", "<Residency", "Requests/s", "Failed/s", "Limited/s", "Requests per second", "Inputs per second", "Tokens per minute", "Weight"], rows, "No tenant has sent a request yet.")),
    snapshot.tenants_omitted > 0 && h("p", { class: "soft" }, `${snapshot.tenants_omitted} tenants with less traffic are not listed.`)];
}

function rollouts({ snapshot, visitor }) {
  const { rollout } = snapshot;
  const changing = rollout.deployments.filter((deployment) => deployment.next);
  const readyOf = (replicas, revision) => replicas.models.filter((model) => model.revision === revision).reduce((sum, model) => sum + model.ready, 0);
  const change = (deployment) => h("section", { class: "card", "data-key": deployment.name, "aria-label": `Rollout of ${deployment.name}` },
    h("h2", {}, deployment.name, " ", deployment.next.held ? badge("held", "warn") : badge("in progress", "zone")),
    h("p", {}, h("code", {}, deployment.model), " → ", h("code", {}, deployment.next.model)),
    table(`Replicas of ${deployment.name}`, ["Region", "Old", "New"], deployment.regions.map((replicas) => h("tr", { "data-key": replicas.region },
      h("th", { scope: "row" }, regionName(replicas.region)), h("td", {}, `${readyOf(replicas, deployment.revision)} ready`),
      h("td", {}, replicas.target === null ? `${readyOf(replicas, deployment.next.revision)} ready` : bar(readyOf(replicas, deployment.next.revision) / Math.max(1, replicas.target), `${readyOf(replicas, deployment.next.revision)} of ${replicas.target} ready`)))), "No region has replicas."),
    visitor.role === "operator" && deployment.next.held && deployment.next.revision && h("p", {}, h("button", { type: "button", "data-action": "promote", "data-deployment": deployment.name }, "Promote")));
  const outdated = rollout.readers.filter((reader) => reader.generation !== rollout.generation);
  const current = rollout.readers.length - outdated.length;
  const pending = rollout.pending.map((widening) => h("tr", { "data-key": `${widening.kind} ${widening.name}` },
    h("th", { scope: "row" }, `${widening.kind} ${widening.name}`), h("td", { class: "left" }, residency(widening.residency)), h("td", { class: "left" }, residency(widening.to)), h("td", { class: "left" }, widening.outdated_readers.join(", ") || "–")));
  const served = rollout.deployments.map((deployment) => h("tr", { "data-key": deployment.name },
    h("th", { scope: "row" }, deployment.name), h("td", { class: "left" }, h("code", {}, deployment.model)), h("td", { class: "left" }, h("code", {}, deployment.revision ?? "–")),
    h("td", { class: "left" }, deployment.regions.map((replicas) => { const ready = replicas.models.reduce((sum, model) => sum + model.ready, 0); return h("span", { class: "chip" }, regionName(replicas.region), ` ${ready}/${replicas.target ?? ready}`); }))));
  return [heading("Rollouts", `Route table ${rollout.generation}`),
    h("section", { class: "card" }, h("h2", {}, "Readers of the route table"), rollout.readers.length === 0 ? h("p", { class: "empty" }, "No gateway or spoke has acknowledged a table yet.") : h("p", { class: "replicas" }, bar(current / rollout.readers.length, `${current} of ${rollout.readers.length} readers have the current table`, outdated.length ? "warn" : "good"), h("span", {}, `${current} of ${rollout.readers.length} have the current table`)),
      outdated.length > 0 && h("ul", {}, outdated.slice(0, 20).map((reader) => h("li", {}, `${reader.reader}: table ${reader.generation}`)))),
    changing.length ? h("div", { class: "halves" }, changing.map(change)) : null,
    rollout.pending.length > 0 && card("Wider residency, announced", table("Wider residency, announced", ["Resource", "<Now", "<Next", "<Waits for"], pending, "")),
    h("div", { class: "card flush" }, table("Served models", ["Deployment", "<Model", "<Revision", "<Ready replicas"], served, "No deployments are applied."))];
}

// Pages by the first part of the address.
export const PAGES = [
  { path: "", title: "Overview", render: overview },
  { path: "deployments", title: "Deployments", render: (state, name) => (name ? deployment(state, name) : deployments(state)) },
  { path: "regions", title: "Regions", render: regions },
  { path: "gateways", title: "Gateways", render: gateways },
  { path: "tenants", title: "Tenants", render: tenants },
  { path: "rollouts", title: "Rollouts", render: rollouts },
  { path: "drills", title: "Drills", render: drills },
  { path: "requests", title: "Requests", render: requests },
];

// Page of an address that does not exist.
export const NOT_FOUND = { path: "not-found", title: "Not found", render: () => [heading("Not found"), h("p", { class: "empty" }, "The console has no such page.")] };
