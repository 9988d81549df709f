// Draws the report from the JSON embedded in this page. The script loads no resources, and all numbers come from the JSON.
"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const page = document.getElementById("page");
const drill = JSON.parse(document.getElementById("drill").textContent);
const context = JSON.parse(document.getElementById("context").textContent);
const { width: WIDTH, left: LEFT, right: RIGHT } = context.plot;
const TOP = 14, BOTTOM = 40, BADGES = 24;
// Failures that the drill expects are not a bad result; their number is shown in plain text then.
const failuresAreBad = drill === null || !drill.held;

function element(name, attributes, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "circle"].includes(name);
  const created = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) created.setAttribute(key, value);
  created.append(...children.filter(child => child !== null && child !== undefined));
  return created;
}

// A missing value is a dash, not a zero.
function ms(value) {
  if (value === null || value === undefined) return "–";
  return value.toFixed(2);
}
function short(value) {
  if (value >= 1e6) return +(value / 1e6).toPrecision(3) + " M";
  if (value >= 1e4) return +(value / 1e3).toPrecision(3) + " k";
  return String(+value.toPrecision(3));
}
function time(value) { return value >= 1000 ? short(value / 1000) + " s" : short(value) + " ms"; }
// Regions with ok responses. A region has the colour of its name; several regions together have none.
const serving = Object.keys(report.regions).filter(name => report.regions[name].ok > 0);
const colourOf = name => context.colours[name] || "var(--soft)";
// Tasks are told apart by dashes, because colours belong to regions.
const DASHES = ["", "9 5", "2 4", "12 4 2 4"];
const dashOf = index => DASHES[index % DASHES.length];

function table(first, rows) {
  const heads = [first, "requests", "ok", "failed", "retried", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms"];
  const made = element("table", {}, element("tr", {}, ...heads.map(head => element("th", {}, head))));
  for (const [name, group] of rows) {
    const spans = group.latency_ms;
    const cells = [name, group.requests, group.ok, group.failed, group.retried,
      ms(spans.p50), ms(spans.p90), ms(spans.p99), ms(spans.p999), ms(spans.max)];
    made.append(element("tr", {}, ...cells.map((cell, index) =>
      element("td", index === 3 && group.failed > 0 && failuresAreBad ? { class: "bad" } : {}, String(cell)))));
  }
  return element("div", { class: "scroll" }, made);
}

// Round numbers that divide [0, max] into about `parts` parts, five by default.
function ticks(max, least, parts) {
  const step0 = Math.max(max / (parts || 5), least || 0), power = Math.pow(10, Math.floor(Math.log10(step0)));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(step => step >= step0 * 0.999);
  const made = [];
  for (let tick = 0; tick <= max * 1.0001; tick += step) made.push(tick);
  return made;
}

function frame(height) {
  return element("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img" });
}

// Plot over the seconds of the run, with the numbered events above it.
function overTime(inner, max, unit) {
  const seconds = context.seconds;
  const x = second => LEFT + second / seconds * (WIDTH - LEFT - RIGHT);
  const top = TOP + (context.badges.length > 0 ? BADGES : 0), height = inner + top;
  const svg = frame(height);
  const y = value => height - BOTTOM - value / (max || 1) * (height - top - BOTTOM);
  for (const tick of ticks(max || 1)) {
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
      element("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, unit(tick)));
  }
  for (const tick of ticks(seconds, 1, 10)) {
    svg.append(element("text", { x: x(tick), y: height - BOTTOM + 18, "text-anchor": "middle" }, short(tick)));
  }
  svg.append(element("text", { x: WIDTH - RIGHT, y: height - 6, "text-anchor": "end" }, "seconds since the start, by intended start of the requests"));
  const finish = () => {
    for (const mark of report.marks) {
      const at = x(mark.at_ms / 1000);
      svg.append(element("line", { class: mark.is_action ? "mark action" : "mark", x1: at, x2: at, y1: top, y2: height - BOTTOM }));
    }
    for (const badge of context.badges) {
      svg.append(element("rect", { class: badge.is_action ? "badge action" : "badge", x: badge.left, y: TOP - 8, width: badge.width, height: 19, rx: 9.5 }),
        element("text", { class: badge.is_action ? "badge action" : "badge", x: badge.left + badge.width / 2, y: TOP + 6, "text-anchor": "middle" }, badge.text));
    }
    return svg;
  };
  return { svg, x, y, seconds, finish };
}

function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([name, stroke, kind, dash]) => {
    const sample = kind === "area" ? element("i", { class: "area", style: `background:${stroke}` })
      : element("svg", { class: "sample", viewBox: "0 0 34 10" },
          element("line", { x1: 1, x2: 33, y1: 5, y2: 5, stroke, "stroke-width": 3, "stroke-dasharray": dash || "" }));
    return element("span", {}, sample, name);
  }));
}

// Line through the seconds that have a value; seconds without a value interrupt it.
function line(plot, points, attributes) {
  let path = "", before = null;
  points.forEach(([second, value], index) => {
    const [x, y] = [plot.x(second + 0.5).toFixed(1), plot.y(value).toFixed(1)];
    const joins = before === second - 1, continues = index + 1 < points.length && points[index + 1][0] === second + 1;
    path += (joins ? "L" : "M") + x + " " + y;
    // An isolated second is a point.
    if (!joins && !continues) plot.svg.append(element("circle", { cx: x, cy: y, r: 3, fill: attributes.stroke }));
    before = second;
  });
  plot.svg.append(element("path", { d: path || "M0 0", fill: "none", "stroke-width": 2, "stroke-linecap": "round", "stroke-linejoin": "round", ...attributes }));
}

function latency(task) {
  const names = serving.filter(name => task.regions[name] && task.regions[name].ok > 0);
  if (names.length === 0) return [element("p", { class: "soft" }, "No ok responses.")];
  const values = task.seconds.flatMap(row => Object.values(row.regions).map(here => here.p99_ms || 0));
  const plot = overTime(286, Math.max(0.1, ...values) * 1.08, time);
  const entries = [];
  for (const name of names) {
    const of = key => task.seconds.filter(row => row.regions[name] && row.regions[name][key] !== null)
      .map(row => [row.second, row.regions[name][key]]);
    line(plot, of("p99_ms"), { stroke: colourOf(name), "stroke-dasharray": "6 4" });
    line(plot, of("p50_ms"), { stroke: colourOf(name) });
    entries.push([name + " p50", colourOf(name)], [name + " p99", colourOf(name), "line", "6 4"]);
  }
  return [legend(entries), plot.finish()];
}

function percentiles() {
  const height = 320, svg = frame(height), decades = 5;
  const curves = report.tasks.map(task => [task.name, task.percentiles]);
  // Latencies of queries and of a backfill differ by decades, so this axis is logarithmic as well.
  const values = curves.flatMap(([, points]) => points.map(point => Math.max(point[1], 0.001)));
  const low = Math.min(...values, 1e6) * 0.8, high = Math.max(low * 10, ...values) * 1.2;
  const x = share => LEFT + Math.min(decades, -Math.log10(1 - share)) / decades * (WIDTH - LEFT - RIGHT);
  const y = value => height - BOTTOM - Math.log(Math.max(value, low) / low) / Math.log(high / low) * (height - TOP - BOTTOM);
  const steps = high / low > 2000 ? [1] : high / low > 100 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const tick of steps.map(step => step * Math.pow(10, power)).filter(tick => tick >= low && tick <= high)) {
      svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
        element("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, time(tick)));
    }
  }
  for (const [share, name] of [[0, "0 %"], [0.5, "50 %"], [0.9, "90 %"], [0.99, "99 %"], [0.999, "99.9 %"], [0.9999, "99.99 %"], [0.99999, "99.999 %"]]) {
    svg.append(element("line", { class: "grid", x1: x(share), x2: x(share), y1: TOP, y2: height - BOTTOM }),
      element("text", { x: x(share), y: height - BOTTOM + 18, "text-anchor": share === 0.99999 ? "end" : "middle" }, name));
  }
  svg.append(element("text", { x: WIDTH - RIGHT, y: height - 6, "text-anchor": "end" }, "share of ok requests, as far as the number of requests supports it"));
  curves.forEach(([, points], index) => {
    const path = points.map(([share, value], at) => (at ? "L" : "M") + x(share).toFixed(1) + " " + y(value).toFixed(1)).join("");
    svg.append(element("path", { d: path || "M0 0", fill: "none", stroke: "var(--text)", "stroke-width": 2, "stroke-dasharray": dashOf(index) }));
  });
  return [legend(curves.map(([name], index) => [name, "var(--text)", "line", dashOf(index)])), svg];
}

function throughput() {
  const count = (row, key) => Object.values(row.regions).reduce((sum, here) => sum + here[key], 0);
  const most = Math.max(1, ...report.seconds.map(row => count(row, "ok") + count(row, "failed")));
  const plot = overTime(226, most * 1.08, short);
  // Seconds without a request are zeros here, not gaps.
  const all = Array.from({ length: plot.seconds }, (_, second) => report.seconds.find(row => row.second === second) || { second, regions: {} });
  line(plot, all.map(row => [row.second, count(row, "ok")]), { stroke: "var(--text)" });
  line(plot, all.map(row => [row.second, count(row, "failed")]), { stroke: "var(--bad)", "stroke-dasharray": "4 3" });
  return [legend([["ok/s", "var(--text)"], ["failed/s", "var(--bad)", "line", "4 3"]]), plot.finish()];
}

function served() {
  const names = serving;
  const rows = second => report.seconds.find(row => row.second === second) || { regions: {} };
  const ok = (second, name) => (rows(second).regions[name] || { ok: 0 }).ok;
  const most = Math.max(1, ...report.seconds.map(row => names.reduce((sum, name) => sum + ok(row.second, name), 0)));
  const plot = overTime(226, most * 1.08, short);
  const base = new Array(plot.seconds).fill(0);
  names.forEach(name => {
    let up = "", down = "";
    for (let second = 0; second < plot.seconds; second++) {
      const low = base[second], high = low + ok(second, name);
      const [from, to] = [plot.x(second).toFixed(1), plot.x(second + 1).toFixed(1)];
      up += `${up ? "L" : "M"}${from} ${plot.y(high).toFixed(1)}L${to} ${plot.y(high).toFixed(1)}`;
      down = `L${to} ${plot.y(low).toFixed(1)}L${from} ${plot.y(low).toFixed(1)}` + down;
      base[second] = high;
    }
    plot.svg.append(element("path", { d: up + down + "Z", fill: colourOf(name), "fill-opacity": 0.75 }));
  });
  return [legend(names.map(name => [name, colourOf(name), "area"])), plot.finish()];
}

function figure(value, name, bad) {
  return element("div", { class: "figure" }, element("b", bad ? { class: "bad" } : {}, value), element("span", {}, name));
}

// Figures of one task. Those of several tasks are never added up: a percentile of queries and of a backfill together is that of neither.
function figures(task) {
  const spans = task.latency_ms;
  return element("div", { class: "figures" },
    figure(String(task.requests), "requests"),
    figure(String(task.failed), "failed", task.failed > 0 && failuresAreBad),
    figure(String(task.retried), "retried"),
    figure(ms(spans.p50) + " ms", "p50"),
    figure(ms(spans.p99) + " ms", "p99"),
    figure(ms(spans.p999) + " ms", "p99.9"));
}

function heading(text, ...content) { page.append(element("h2", {}, text), ...content); }

function paragraph(text, kind) { return element("p", kind ? { class: kind } : {}, text); }

// Name, purpose and verdict of a drill.
function verdict() {
  const held = drill.expectations.filter(each => each.held).length, all = drill.expectations.length;
  const span = each => `${short(each.from_ms / 1000)} to ${short(each.to_ms / 1000)} s`;
  const rows = drill.expectations.map(each => element("tr", {},
    element("td", { class: each.held ? "good" : "bad" }, each.held ? "✓ holds" : "✗ fails"),
    element("td", {}, element("code", {}, each.expectation)), element("td", {}, span(each)), element("td", { class: "wide" }, each.observed)));
  const heads = ["verdict", "expectation", "from, to", "observed"].map(head => element("th", {}, head));
  return [
    element("h1", {}, "Drill " + drill.name + " ", element("span", { class: drill.held ? "verdict good" : "verdict bad" }, drill.held ? "passed" : "failed")),
    element("p", { class: "purpose" }, drill.description),
    paragraph(`${context.date} · ${context.version} · ${context.machine}`, "soft"),
    paragraph(`${drill.fleet}; ${drill.demand}`, "soft"),
    element("h2", {}, `${held} of ${all} expectations hold`),
    element("div", { class: "scroll" }, element("table", { class: "left" }, element("tr", {}, ...heads), ...rows)),
  ];
}

function pace(task) {
  const load = drill && drill.loads.find(load => load.name === task.name);
  if (load) {
    const inputs = load.inputs === 1 ? "one text" : `${load.inputs} texts`;
    return `clients near ${load.near}, deployment ${load.model}: ${short(load.requests_per_second)} requests/s, ${inputs} each`;
  }
  const when = task.pacing === "open" ? `requests per second ${task.rate} (${task.arrival})`
    : task.pacing === "closed" ? `${task.callers} ${task.callers === 1 ? "caller" : "callers"} in a closed loop for ${short(task.duration_ms / 1000)} s` : "recorded requests";
  const unit = task.workload === "rerank" ? "documents" : "texts";
  const workload = task.name === task.workload ? "" : task.workload + ", ";
  return `${workload}${task.priority}: ${when}; ${task.inputs_per_request} of ${task.texts} ${unit} per request (${task.texts_source})`;
}

const several = report.tasks.length > 1;
const unit = drill ? "load" : "task";
if (drill) {
  document.title = `Drill ${drill.name}: ${drill.held ? "passed" : "failed"}`;
  page.append(...verdict());
} else {
  document.title = "Load on " + report.model;
  page.append(element("h1", {}, "Load on deployment " + report.model),
    paragraph(`${report.target} · HTTP/${report.http} · ${context.date} · ${context.version} · generated on ${context.machine} · seed ${report.seed}` +
      (report.stopped_early ? " · stopped early" : ""), "soft"));
  if (report.slo) {
    const { objective, holds, requests, good, within_ms, goodput_per_s } = report.slo;
    page.append(element("p", {}, element("span", { class: holds ? "verdict good" : "verdict bad" }, `${objective} ${holds ? "holds" : "does not hold"}`),
      ` ${(good / Math.max(requests, 1) * 100).toFixed(2)} % of ${requests} interactive requests within ${short(within_ms)} ms, goodput ${short(goodput_per_s)}/s`));
  }
}
if (report.lag_notable) {
  page.append(paragraph(`The lag of the generator (p99 ${ms(report.lag_ms.p99)} ms) is a significant part of the latencies.`, "bad"));
}
if (drill || several) page.append(element("h2", {}, drill ? (several ? "Loads" : "Load") : "Tasks"));
for (const task of report.tasks) {
  page.append(element("div", { class: "task" },
    element("p", {}, element("b", {}, task.name), element("span", { class: "soft" }, " " + pace(task))), figures(task)));
}
if (report.marks.length > 0) {
  heading("Events", element("ol", { class: "events" }, ...report.marks.map((mark, index) =>
    element("li", mark.is_action ? { class: "action" } : {}, element("span", { class: "number" }, String(index + 1)),
      element("span", { class: "at" }, (mark.at_ms / 1000).toFixed(2) + " s"), element("span", {}, mark.label)))));
}
for (const task of report.tasks) {
  heading("Latency over time by region" + (several ? ": " + task.name : ""), ...latency(task));
}
heading("Percentiles", ...percentiles());
heading("Throughput and errors" + (several ? ` of all ${unit}s` : ""), ...throughput());
heading("Requests by serving region" + (several ? ` of all ${unit}s` : ""), ...served());
for (const task of report.tasks) {
  heading("By region" + (several ? ": " + task.name : ""), table("region", [...Object.entries(task.regions), ["total", task]]));
}
const stages = report.tasks.flatMap(task => task.stages.length > 1 ? task.stages.map(stage =>
  [`${task.name} from ${short(stage.start_ms / 1000)} s: ${stage.rate_from_per_s === stage.rate_to_per_s ? stage.rate_from_per_s : stage.rate_from_per_s + " to " + stage.rate_to_per_s} requests/s`, stage]) : []);
if (stages.length > 0) heading("By stage", table("stage", stages));
const failures = report.tasks.flatMap(task => task.failures.map(failure =>
  element("tr", {}, element("td", {}, task.name), element("td", {}, String(failure.count)), element("td", { class: "wide" }, failure.cause))));
if (failures.length > 0) {
  heading("Failures", element("table", { class: "left" }, element("tr", {}, ...[unit, "requests", "cause"].map(head => element("th", {}, head))), ...failures));
}
page.append(element("footer", {},
  `Latencies in milliseconds, of ok requests, from the intended start. Retried: more than one attempt; the parts of a split request are not retries. ` +
  `Generator lag: p50 ${ms(report.lag_ms.p50)} ms, p99 ${ms(report.lag_ms.p99)} ms, max ${ms(report.lag_ms.max)} ms. ` +
  "Percentiles of single seconds are rounded up by at most 0.8 %. All numbers come from the JSON embedded in this page."));
