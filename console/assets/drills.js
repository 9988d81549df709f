// Page of drills: the list, and the one that runs or has run last, with its timeline, its expectations and its verdict.

import { badge, columns, h, s } from "./dom.js";

const LEFT = 10, WIDTH = 940, TOP = 24, ROW = 26;
const STATES = {
  starting: ["starting", "zone"], running: ["running", "zone"], restoring: ["restoring the fleet", "zone"], held: ["all expectations held", "good"],
  not_held: ["an expectation did not hold", "bad"], stopped: ["stopped", "warn"], failed: ["could not be executed", "bad"],
};
const EXPECTED = {
  pending: ["waits", ""], observed: ["being observed", "zone"], ended: ["verdict at the end", ""], not_evaluated: ["not evaluated", ""], held: ["held", "good"], not_held: ["did not hold", "bad"],
};

const seconds = (value) => `${(value / 1000).toFixed(value % 1000 ? 1 : 0)} s`;
const stateOf = (states, name) => states[name] ?? [name, ""];

// Spans of the expectations and times of the steps on one axis, with the present.
function timeline(run) {
  const x = (at) => LEFT + (at / Math.max(1, run.duration_ms)) * (WIDTH - 2 * LEFT);
  const height = TOP + run.expectations.length * ROW + 8;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => [
    s("line", { class: "grid", x1: x(run.duration_ms * part), x2: x(run.duration_ms * part), y1: 16, y2: height }),
    s("text", { class: "figure", x: x(run.duration_ms * part), y: 10, "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }, seconds(run.duration_ms * part))]);
  const bars = run.expectations.map((expectation, index) => {
    const y = TOP + index * ROW, width = Math.max(3, x(expectation.to_ms) - x(expectation.from_ms));
    const isLate = x(expectation.from_ms) > WIDTH / 2;
    return s("g", { "data-key": index }, s("rect", { class: `expected ${expectation.state}`, x: x(expectation.from_ms), y, width, height: 20, rx: 3 }),
      s("text", { x: isLate ? x(expectation.to_ms) - 6 : x(expectation.from_ms) + 6, y: y + 14, "text-anchor": isLate ? "end" : "start" }, expectation.text));
  });
  const steps = run.steps.map((step, index) => s("line", { class: "step", "data-key": `step-${index}`, x1: x(step.at_ms), x2: x(step.at_ms), y1: 16, y2: height }));
  const label = `Timeline of ${seconds(run.duration_ms)}: ${run.steps.map((step) => `${step.text} at ${seconds(step.at_ms)}`).join("; ")}`;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline" },
    s("svg", { class: "waterfall drill", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ticks, bars, steps,
      s("line", { class: "present", "data-key": "present", x1: x(run.elapsed_ms), x2: x(run.elapsed_ms), y1: 14, y2: height })));
}

function expectations(run) {
  const rows = run.expectations.map((expectation, index) => {
    const [text, cls] = stateOf(EXPECTED, expectation.state);
    return h("tr", { "data-key": index, "data-state": expectation.state }, h("th", { scope: "row" }, h("code", {}, expectation.text)),
      h("td", {}, `${seconds(expectation.from_ms)} to ${seconds(expectation.to_ms)}`), h("td", { class: "left" }, badge(text, cls)), h("td", { class: "left" }, expectation.observed ?? "–"));
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Expectations" }, h("table", {}, h("caption", { class: "hidden" }, "Expectations"),
    columns(["Expectation", "Span", "<State", "<Observed"]), h("tbody", {}, rows)));
}

function events(run) {
  if (!run.events.length) return h("p", { class: "empty" }, "Nothing has happened yet.");
  // The newest first, as on the overview.
  const items = run.events.map((event, index) => h("li", { class: event.is_action ? "bad" : "", "data-key": index }, h("span", {}, event.is_action ? h("strong", {}, event.text) : event.text), h("time", {}, seconds(event.at_ms))));
  return [h("ol", { class: "events", tabindex: "0", "aria-label": "Events of the drill", reversed: true }, items.reverse()),
    run.events_omitted > 0 && h("p", { class: "soft" }, `${run.events_omitted} later events are not listed.`)];
}

function shown(run, visitor) {
  const [text, cls] = stateOf(STATES, run.state);
  return [
    h("section", { class: "card", "data-key": "run", "data-state": run.state, "aria-label": `Drill ${run.name}` },
      h("h2", {}, run.name, " ", badge(text, cls)), h("p", {}, run.description),
      h("p", { class: "soft" }, `${seconds(run.elapsed_ms - (run.elapsed_ms % 1000))} of ${seconds(run.duration_ms)}`, run.is_active && visitor.role === "operator" && [" ", h("button", { type: "button", "data-action": "stopDrill" }, "Stop")]),
      run.problems.map((problem) => h("p", { class: "bad" }, problem)),
      timeline(run)),
    h("div", { class: "halves", "data-key": "details" },
      h("section", { class: "card", "aria-label": "Expectations of the drill" }, h("h2", {}, "Expectations"), expectations(run)),
      h("section", { class: "card drillevents", "aria-label": "Events" }, h("h2", {}, "Events"), events(run))),
    // Read aloud when it changes.
    h("p", { class: "hidden", role: "status", "data-key": "announced" }, `Drill ${run.name}: ${text}`),
  ];
}

function action(drill, run, visitor) {
  if (drill.unmet) return h("span", { class: "soft" }, drill.unmet);
  if (visitor.role !== "operator") return h("span", { class: "soft" }, "operators start it");
  return h("button", { type: "button", "data-action": "startDrill", "data-drill": drill.name, disabled: Boolean(run?.is_active) }, "Start", h("span", { class: "hidden" }, ` ${drill.name}`));
}

// Returns the page; `state.drills` is what the hub has sent last.
export function drills({ drills: known, visitor }) {
  const heading = h("div", { class: "heading" }, h("h1", {}, "Drills"), h("p", { class: "soft" }, "Faults under load, with expectations about the outcome."));
  if (!known) return [heading, h("p", { class: "empty", role: "status" }, "Loading…")];
  if (known.problem) return [heading, h("p", { class: "empty bad", role: "alert" }, known.problem)];
  if (!known.is_available) return [heading, h("section", { class: "card" }, h("p", {}, known.reason))];
  const rows = known.drills.map((drill) => h("tr", { "data-key": drill.name }, h("th", { scope: "row" }, drill.name, h("span", { class: "soft description" }, drill.description)),
    h("td", {}, seconds(drill.duration_ms)), h("td", { class: "left" }, action(drill, known.run, visitor))));
  return [heading, known.run && shown(known.run, visitor),
    h("div", { class: "card flush", "data-key": "list" }, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Drills" }, h("table", { class: "drills" }, h("caption", { class: "hidden" }, "Drills"),
      columns(["Drill", "Duration", "<Action"]), h("tbody", {}, rows))))];
}
