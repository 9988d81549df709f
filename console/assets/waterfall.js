// Stages of a request over time, as a chart and as a table: what the gateway has measured, and what the region has reported.

import { colour, columns, h, ms, regionName, s } from "./dom.js";

// Rows of a chart. A split request has an attempt for each part.
const ATTEMPTS_MAX = 40;
const LEFT = 210, WIDTH = 940, RIGHT = 120, ROW = 28, TOP = 24;
const REGION_STAGES = [["queue_ms", "Queue"], ["tokenize_ms", "Tokenization"], ["engine_ms", "Engine"]];

const list = (value) => (Array.isArray(value) ? value : []);
const isNumber = (value) => typeof value === "number";
const isGood = (attempt) => attempt.status >= 200 && attempt.status < 300;

// Time in the region that is none of the reported stages: the spoke (checks, selection of a replica, hold while none is ready), parsing
// and writing at the replica, and the network between them. The gateway knows the whole time in the region, which is its wait for
// the response without the network.
function otherInRegion(times) {
  if (!["to_head_ms", "gateway_ms", "network_ms"].every((key) => isNumber(times[key]))) return undefined;
  const reported = REGION_STAGES.reduce((sum, [key]) => sum + (isNumber(times[key]) ? times[key] : 0), 0);
  return Math.max(0, times.to_head_ms - times.gateway_ms - times.network_ms - reported);
}

// Stages that the region has reported, one after the other within the attempt, after half of the time in the network: a region
// reports durations, and no clock is shared.
function regionStages(attempt, times) {
  let start = attempt.began_ms + (times.network_ms ?? 0) / 2;
  const other = otherInRegion(times);
  const found = REGION_STAGES.filter(([key]) => isNumber(times[key])).map(([key, name]) => ({ key, name, took: times[key], text: "reported by the region" }));
  if (other !== undefined) found.unshift({ key: "spoke_ms", name: "Spoke and transfer", took: other, text: "rest of the time in the region: checks, selection of a replica, hold, parsing, transfer" });
  return found.map(({ key, ...stage }) => {
    const placed = { ...stage, key: `${attempt.attempt}-${key}`, isInner: true, region: attempt.region, start };
    start += stage.took;
    return placed;
  });
}

// Returns the stages in the order of the chart.
export function stages(explanation) {
  const { total_ms: total, routing, times } = explanation;
  const attempts = list(explanation.attempts);
  const served = explanation.region ? attempts.findLast((attempt) => attempt.region === explanation.region && isGood(attempt)) : undefined;
  const rows = [{ key: "request", name: "Request", start: 0, took: total ?? 0, text: explanation.outcome.replaceAll("_", " ") }];
  if (routing) {
    rows.push({ key: "admission", name: "Admission", isInner: true, start: 0, took: routing.began_ms, text: "authentication, limits, body, policy" },
      { key: "routing", name: "Routing decision", isInner: true, start: routing.began_ms, took: routing.took_ms, text: `${list(explanation.regions).filter((region) => region.rank).length} candidates` });
  }
  attempts.slice(0, ATTEMPTS_MAX).forEach((attempt, index) => {
    rows.push({ key: `attempt-${index}`, name: `Attempt ${attempt.attempt}`, isAttempt: true, region: attempt.region, start: attempt.began_ms, took: attempt.took_ms, isFailed: !isGood(attempt),
      text: `${attempt.cause.replaceAll("_", " ")}: ${attempt.end.replaceAll("_", " ")}${attempt.status ? ` (${attempt.status})` : ""}${attempt.instance ? `, instance ${attempt.instance}` : ""}` });
    if (attempt === served && times) rows.push(...regionStages(attempt, times));
  });
  if (isNumber(times?.to_head_ms) && isNumber(total)) {
    rows.push({ key: "respond", name: "Response to client", isInner: true, start: times.to_head_ms, took: Math.max(0, total - times.to_head_ms), text: "first to last byte" });
  }
  return rows;
}

function chart(rows) {
  const total = Math.max(0.001, ...rows.map(({ start, took }) => start + took));
  const x = (at) => LEFT + (at / total) * (WIDTH - LEFT - RIGHT);
  const bars = rows.map((row, index) => {
    const y = TOP + index * ROW, width = Math.max(2, x(row.start + row.took) - x(row.start)), end = x(row.start) + width;
    const cls = row.region ? colour(row.region) : "ink";
    return s("g", { class: row.isAttempt ? "attempt" : "stage", "data-key": row.key },
      s("text", { class: row.isInner ? "figure" : null, x: row.isInner ? 14 : 0, y: y + 14 }, row.isAttempt ? `${row.name.replace("Attempt ", "")}  ${row.region}` : row.name),
      s("rect", { class: `span ${cls} ${row.isFailed ? "failed" : ""} ${row.isInner ? "inner" : ""}`, x: x(row.start), y: row.isInner ? y + 4 : y, width, height: row.isInner ? 12 : 20, rx: 3 }),
      s("text", { class: "figure", x: end + 6, y: y + 14 }, `${ms(row.took)}${row.isFailed ? " failed" : ""}`));
  });
  const height = TOP + rows.length * ROW + 6;
  const grid = [0, 0.25, 0.5, 0.75, 1].map((part) => [
    s("line", { class: "grid", x1: x(total * part), x2: x(total * part), y1: 16, y2: height - 4 }),
    s("text", { class: "figure", x: x(total * part), y: 10, "text-anchor": "middle" }, ms(total * part))]);
  const label = `Stages of the request: ${rows.map((row) => `${row.name}${row.isAttempt ? ` to ${row.region}, ${row.text}` : ""}, from ${ms(row.start)} for ${ms(row.took)}`).join("; ")}`;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Stages over time" },
    s("svg", { class: "waterfall", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, grid, bars));
}

function table(rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Stages as a table" },
    h("table", {}, h("caption", { class: "hidden" }, "Stages of the request"), columns(["Stage", "<Region", "Begin", "Duration", "<Details"]),
      h("tbody", {}, rows.map((row) => h("tr", { "data-key": row.key }, h("th", { scope: "row" }, row.name), h("td", { class: "left" }, row.region ? regionName(row.region) : "gateway"),
        h("td", {}, ms(row.start)), h("td", {}, ms(row.took)), h("td", { class: "left" }, row.text))))));
}

// Spans of spoke and replica are in the tracing backend only, which the console does not read.
const trace = (id) => h("p", { class: "soft trace" }, id ? ["The spans of spoke and replica (such as select replica, hold and queue) are in your tracing backend, if the trace was exported: trace ", h("code", {}, id), "."]
  : "The request has no trace: its gateway exports none.");

// Returns the chart and the table of a request.
export function waterfall(explanation) {
  const rows = stages(explanation), attempts = list(explanation.attempts);
  const isReported = REGION_STAGES.some(([key]) => isNumber(explanation.times?.[key]));
  const sums = [["gateway_ms", attempts.length > 1 ? "Gateway and earlier attempts" : "Gateway"], ["network_ms", "Network"]].filter(([key]) => isNumber(explanation.times?.[key])).map(([key, name]) => `${name} ${ms(explanation.times[key])}`);
  return [
    chart(rows),
    h("p", { class: "soft" }, attempts.length === 0 ? "It was sent to no region. " : isReported ? "Queue, tokenization and engine are durations that the region has reported, and the rest of its time is that of the spoke and of transfers; their place within the attempt is estimated. " : "The region has reported no times of its own. ",
      sums.length > 0 && `${sums.join(", ")}.`),
    trace(explanation.trace_id),
    attempts.length > ATTEMPTS_MAX && h("p", { class: "soft" }, `${attempts.length - ATTEMPTS_MAX} further attempts are not shown.`),
    h("details", {}, h("summary", {}, "Stages as a table"), table(rows)),
  ];
}
