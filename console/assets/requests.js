// Page of requests: search, and one request with its routing decision, the reason of every region, and its stages.

import { badge, clock, columns, h, ms, regionName } from "./dom.js";
import { waterfall } from "./waterfall.js";

const list = (value) => (Array.isArray(value) ? value : []);
// Reasons why a request is kept. A gateway of a newer version may have others.
const KINDS = { failed: ["failed", "bad"], failed_over: ["failed over", "warn"], slow: ["slow", "warn"], rejected: ["rejected", ""], sampled: ["sampled", ""] };
const PERIODS = [["15", "15 minutes"], ["60", "1 hour"], ["360", "6 hours"], ["1440", "24 hours"]];

function reasons(candidate) {
  if (candidate.rejected) return h("span", { class: "soft" }, candidate.rejected.replaceAll("_", " "));
  const marks = [["assigned", "assigned to this part"], ["fastest", "fastest of the near"], ["drawn", "drawn by the plan"], ["holds", "in a cold start"], ["draining", "draining"]];
  const planned = candidate.weight_permille === null || candidate.weight_permille === undefined ? [] : [`planned ${(candidate.weight_permille / 10).toFixed(1)} % (${candidate.planned})`];
  return [...marks.filter(([key]) => candidate[key]).map(([, text]) => text), ...planned].map((text) => [badge(text), " "]);
}

function decision({ gateway, explanation }) {
  const facts = [["Outcome", `${explanation.outcome} (${explanation.status ?? "no response"})`], ["Arrived", clock(explanation.at_ms)], ["Time", ms(explanation.total_ms)], ["Served by", explanation.region ? regionName(explanation.region) : "no region"], ["Gateway", gateway],
    ["Endpoint", explanation.endpoint], ["Deployment", explanation.deployment ?? "–"], ["Tenant", explanation.tenant ?? "–"], ["Residency", explanation.residency ?? "–"], ["Origin", explanation.origin ?? "–"],
    ["Inputs", explanation.inputs ?? "–"], ["Tokens", explanation.tokens ?? "–"], ["Tokens estimated", explanation.tokens_estimated ?? "–"], ["Admission pool", explanation.admission_pool ?? "–"], ["Route table", explanation.generation ?? "–"]];
  const regions = list(explanation.regions).map((candidate) => h("tr", { "data-key": candidate.region },
    h("td", {}, candidate.rank ?? "–"), h("th", { scope: "row" }, regionName(candidate.region)),
    h("td", { class: "left" }, candidate.rejected ? badge("rejected", "bad") : badge(candidate.health, candidate.health === "healthy" ? "good" : "warn")),
    h("td", {}, candidate.rejected ? "–" : ms(candidate.rtt_ms)), h("td", {}, candidate.rejected ? "–" : ms(candidate.response_in_ms)), h("td", { class: "left" }, reasons(candidate))));
  const notes = [];
  if (explanation.spillover?.to) notes.push(["Spilled over to ", regionName(explanation.spillover.to), ` with ${explanation.spillover.tokens} tokens of credit.`]);
  if (explanation.rejection) notes.push([`The pool of the nearest region rejected it (${explanation.rejection.reason}): queue ${ms(explanation.rejection.wait_ms)}${explanation.rejection.retry_after_ms === undefined ? "" : `, retry after ${ms(explanation.rejection.retry_after_ms)}`}.`]);
  if (explanation.order?.place) notes.push([`Place ${explanation.order.place} of the order of the deployment`, list(explanation.order.passed_over).map(({ region, reason }) => ["; ", regionName(region), ` passed over: ${reason.replaceAll("_", " ")}`]), "."]);
  return [
    h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    h("section", { class: "card", "aria-label": "Stages" }, h("h2", {}, "Stages"), waterfall(explanation)),
    h("section", { class: "card", "aria-label": "Regions" }, h("h2", {}, "Routing decision"), notes.map((note) => h("p", {}, note)),
      regions.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" }, h("table", {}, h("caption", { class: "hidden" }, "Candidates and rejected regions"),
        columns(["Rank", "<Region", "<Health", "Round trip", "Response in", "<Reasons"]), h("tbody", {}, regions))) : h("p", { class: "empty" }, "No region was selected.")),
  ];
}

const field = (id, label, control) => h("div", { class: "field", "data-key": id }, h("label", { for: id }, label), control);
const select = (id, name, options, chosen) => h("select", { id, name }, options.map(([value, text]) => h("option", { value, selected: value === chosen, "data-key": value }, text)));
const text = (id, name, placeholder) => h("input", { id, name, type: "text", autocomplete: "off", spellcheck: "false", maxlength: "64", placeholder });

function searchForm(snapshot) {
  return h("form", { class: "filters", role: "search", "aria-label": "Search requests", "data-action": "search" },
    field("search-period", "Period", select("search-period", "period", PERIODS, "60")),
    field("search-until", "Until (empty: now)", h("input", { id: "search-until", name: "until", type: "datetime-local", step: "1" })),
    field("search-kept", "Kind", select("search-kept", "kept", [["", "all"], ...Object.entries(KINDS).map(([value, [name]]) => [value, name])], "")),
    field("search-region", "Region", select("search-region", "region", [["", "all"], ...snapshot.regions.map(({ id }) => [id, id])], "")),
    field("search-tenant", "Tenant", text("search-tenant", "tenant", "all")),
    field("search-deployment", "Deployment", text("search-deployment", "deployment", "all")),
    field("search-status", "Status", text("search-status", "status", "503, 5xx, none")),
    field("search-outcome", "Outcome", text("search-outcome", "outcome", "all")),
    h("button", { type: "submit" }, "Search"));
}

// The key is the place of the row: two requests may have the same id.
function row(request, index) {
  const [kind, cls] = Object.hasOwn(KINDS, request.kept) ? KINDS[request.kept] : [request.kept, ""];
  const path = request.attempts.map((region, index) => [index > 0 && " → ", regionName(region)]);
  return h("tr", { "data-key": index, "data-kept": request.kept },
    h("th", { scope: "row" }, h("time", { datetime: new Date(request.at_ms).toISOString() }, clock(request.at_ms))),
    h("td", { class: "left" }, request.id ? h("a", { href: `#/requests/${encodeURIComponent(request.id)}` }, h("code", {}, request.id)) : h("span", { class: "soft" }, "withheld")),
    h("td", { class: "left" }, badge(kind, cls)), h("td", {}, request.status ?? "–"), h("td", { class: "left" }, request.outcome.replaceAll("_", " ")), h("td", {}, ms(request.total_ms)),
    h("td", { class: "left" }, request.tenant ?? "–"), h("td", { class: "left" }, request.deployment ?? "–"), h("td", { class: "left" }, path.length ? path : "none"), h("td", { class: "left" }, request.gateway));
}

// Returns why the result may lack requests, the most severe first.
function gaps({ requests, has_more: hasMore, unresponsive, disabled, problems }) {
  const oldest = requests.at(-1);
  return [
    ...problems.map(({ gateway, problem }) => `A gateway in ${gateway}: ${problem}.`),
    unresponsive.length > 0 && `No response from gateways in ${unresponsive.join(", ")}.`,
    disabled.length > 0 && `Gateways in ${disabled.join(", ")} keep no explanations: [explanations] is missing in their configuration.`,
    hasMore && oldest && `There are older ones; narrow the search, or search until ${clock(oldest.at_ms)}.`,
  ].filter(Boolean);
}

function results(search) {
  if (search.pending) return h("p", { class: "empty", role: "status" }, "Searching the gateways…");
  if (search.problem) return h("p", { class: "empty bad", role: "alert" }, search.problem);
  const { requests, has_more: hasMore, unresponsive, problems } = search.result;
  const isIncomplete = hasMore || unresponsive.length > 0 || problems.length > 0;
  const count = requests.length === 1 ? "1 request" : `${requests.length} requests`;
  const isFailed = problems.length > 0 || unresponsive.length > 0;
  return [
    h("p", { role: "status" }, requests.length === 0 && isIncomplete ? "No requests found, but not all were searched" : count),
    gaps(search.result).map((text) => h("p", { class: isFailed ? "bad" : "soft" }, text)),
    requests.length > 0 && h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Found requests" }, h("table", { class: "found" }, h("caption", { class: "hidden" }, "Found requests"),
      columns(["Arrived", "<Request", "<Kind", "Status", "<Outcome", "Time", "<Tenant", "<Deployment", "<Attempts", "<Gateway"]), h("tbody", {}, requests.map(row)))),
    requests.some(({ id }) => !id) && h("p", { class: "soft" }, "Ids of requests with a residency policy are withheld; `meridian get requests` at the gateway shows them."),
  ];
}

// Returns the page; `state.lookup` is the last request that was looked up, `state.search` the last search.
export function requests({ lookup, search, snapshot }, id) {
  const found = lookup?.id === id ? lookup : undefined;
  return [
    h("div", { class: "heading" }, h("h1", {}, "Requests"), h("p", { class: "soft" }, "The id of a request is in its response header x-request-id.")),
    h("form", { class: "search", role: "search", "aria-label": "Explain a request", "data-action": "lookup" }, h("label", { for: "request-id" }, "Request id"), h("input", { id: "request-id", name: "id", type: "text", autocomplete: "off", spellcheck: "false", maxlength: "128", required: true }), h("button", { type: "submit" }, "Explain")),
    !id && h("section", { class: "card", "data-key": "search", "aria-label": "Search" }, h("h2", {}, "Failed, failed-over, slow, rejected and sampled requests"), searchForm(snapshot), search && results(search)),
    id && h("p", {}, h("a", { href: "#/requests" }, "Search"), " / ", h("code", {}, id)),
    id && (!found || found.pending) && h("p", { class: "empty", role: "status" }, "Searching the gateways…"),
    found?.problem && h("p", { class: "empty bad", role: "alert" }, found.problem),
    found?.result && decision(found.result),
  ];
}
