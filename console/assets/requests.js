// Page of one request: the routing decision with the reason of every region, and the attempts.

import { badge, colour, columns, h, ms, regionName, s } from "./dom.js";

const list = (value) => (Array.isArray(value) ? value : []);

// Attempts on a common time axis.
function waterfall(explanation) {
  const attempts = list(explanation.attempts);
  const total = Math.max(explanation.total_ms ?? 0, 0.001, ...attempts.map((attempt) => attempt.began_ms + attempt.took_ms));
  const LEFT = 190, WIDTH = 900, ROW = 30;
  const x = (at) => LEFT + (at / total) * (WIDTH - LEFT - 90);
  const rows = attempts.map((attempt, index) => {
    const y = 24 + index * ROW, width = Math.max(2, x(attempt.began_ms + attempt.took_ms) - x(attempt.began_ms));
    const good = attempt.status >= 200 && attempt.status < 300;
    return s("g", { "data-key": index },
      s("text", { x: 0, y: y + 15 }, `${attempt.attempt}  ${attempt.region}`),
      s("rect", { class: `span ${colour(attempt.region)} ${good ? "" : "failed"}`, x: x(attempt.began_ms), y, width, height: 20, rx: 3 }),
      s("text", { class: "figure", x: x(attempt.began_ms) + width + 6, y: y + 15 }, `${ms(attempt.took_ms)} ${attempt.end}`));
  });
  const label = `Attempts: ${attempts.map((attempt) => `${attempt.attempt} to ${attempt.region}, ${attempt.cause}, ${attempt.end}, from ${ms(attempt.began_ms)} for ${ms(attempt.took_ms)}`).join("; ")}`;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Attempts over time" },
    s("svg", { class: "waterfall", viewBox: `0 0 ${WIDTH} ${34 + attempts.length * ROW}`, role: "img", "aria-label": label },
      [0, 0.25, 0.5, 0.75, 1].map((part) => [s("line", { class: "grid", x1: x(total * part), x2: x(total * part), y1: 16, y2: 26 + attempts.length * ROW }), s("text", { class: "figure", x: x(total * part), y: 10, "text-anchor": "middle" }, ms(total * part))]), rows));
}

function reasons(candidate) {
  if (candidate.rejected) return h("span", { class: "soft" }, candidate.rejected.replaceAll("_", " "));
  const marks = [["assigned", "assigned to this part"], ["fastest", "fastest of the near"], ["drawn", "drawn by the plan"], ["holds", "in a cold start"], ["draining", "draining"]];
  const planned = candidate.weight_permille === null || candidate.weight_permille === undefined ? [] : [`planned ${(candidate.weight_permille / 10).toFixed(1)} % (${candidate.planned})`];
  return [...marks.filter(([key]) => candidate[key]).map(([, text]) => text), ...planned].map((text) => [badge(text), " "]);
}

function decision({ gateway, explanation }) {
  const facts = [["Outcome", `${explanation.outcome} (${explanation.status ?? "no response"})`], ["Time", ms(explanation.total_ms)], ["Served by", explanation.region ? regionName(explanation.region) : "no region"], ["Gateway", gateway],
    ["Endpoint", explanation.endpoint], ["Deployment", explanation.deployment ?? "–"], ["Tenant", explanation.tenant ?? "–"], ["Residency", explanation.residency ?? "–"], ["Tokens", explanation.tokens ?? "–"], ["Route table", explanation.generation ?? "–"]];
  const regions = list(explanation.regions).map((candidate) => h("tr", { "data-key": candidate.region },
    h("td", {}, candidate.rank ?? "–"), h("th", { scope: "row" }, regionName(candidate.region)),
    h("td", { class: "left" }, candidate.rejected ? badge("rejected", "bad") : badge(candidate.health, candidate.health === "healthy" ? "good" : "warn")),
    h("td", {}, candidate.rejected ? "–" : ms(candidate.rtt_ms)), h("td", {}, candidate.rejected ? "–" : ms(candidate.response_in_ms)), h("td", { class: "left" }, reasons(candidate))));
  const notes = [];
  if (explanation.spillover?.to) notes.push(["Spilled over to ", regionName(explanation.spillover.to), ` with ${explanation.spillover.tokens} tokens of credit.`]);
  if (explanation.rejection) notes.push([`The pool of the nearest region rejected it (${explanation.rejection.reason}): queue ${ms(explanation.rejection.wait_ms)}.`]);
  const times = Object.entries(explanation.times ?? {}).filter(([, value]) => value !== null);
  return [
    h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    h("section", { class: "card", "aria-label": "Attempts" }, h("h2", {}, "Attempts"), list(explanation.attempts).length ? waterfall(explanation) : h("p", { class: "empty" }, "It was sent to no region."),
      times.length > 0 && h("p", { class: "soft" }, times.map(([stage, value]) => `${stage.replace("_ms", "")} ${ms(value)}`).join(" · "))),
    h("section", { class: "card", "aria-label": "Regions" }, h("h2", {}, "Routing decision"), notes.map((note) => h("p", {}, note)),
      regions.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" }, h("table", {}, h("caption", { class: "hidden" }, "Candidates and rejected regions"),
        columns(["Rank", "<Region", "<Health", "Round trip", "Response in", "<Reasons"]), h("tbody", {}, regions))) : h("p", { class: "empty" }, "No region was selected.")),
  ];
}

// Returns the page; `state.lookup` is the last one that was looked up.
export function requests({ lookup, snapshot }, id) {
  const examples = [...new Set(snapshot.events.map((event) => event.example).filter(Boolean))].slice(0, 5);
  const found = lookup?.id === id ? lookup : undefined;
  return [
    h("div", { class: "heading" }, h("h1", {}, "Requests"), h("p", { class: "soft" }, "The id of a request is in its response header x-request-id.")),
    h("form", { class: "search", role: "search", "data-action": "lookup" }, h("label", { for: "request-id" }, "Request id"), h("input", { id: "request-id", name: "id", type: "text", autocomplete: "off", spellcheck: "false", maxlength: "128", required: true }), h("button", { type: "submit" }, "Explain")),
    !id && examples.length > 0 && h("section", { class: "card", "aria-label": "Recent failovers" }, h("h2", {}, "Recently moved to another region"), h("ul", { class: "plain" }, examples.map((example) => h("li", {}, h("a", { href: `#/requests/${encodeURIComponent(example)}` }, h("code", {}, example)))))),
    id && h("p", {}, h("code", {}, id)),
    id && (!found || found.pending) && h("p", { class: "empty", role: "status" }, "Asking the gateways…"),
    found?.problem && h("p", { class: "empty bad", role: "alert" }, found.problem),
    found?.result && decision(found.result),
  ];
}
