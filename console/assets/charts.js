// Charts as SVG. A chart has a text alternative with its last values; colours are classes, which follow the colour scheme.

import { h, s } from "./dom.js";

const NARROW = 640, WIDE = 1240, LEFT = 44, RIGHT = 8, TOP = 16, BOTTOM = 24;

// Returns a round upper bound of a scale, and the step of its grid.
export function scale(max) {
  if (!(max > 0)) return { top: 1, step: 0.5 };
  const power = 10 ** Math.floor(Math.log10(max));
  const step = [0.2, 0.5, 1, 2, 5].map((unit) => unit * power).find((step) => max / step <= 4);
  return { top: Math.ceil(max / step - 1e-9) * step, step };
}

const short = (value) => (value >= 1e6 ? `${+(value / 1e6).toPrecision(3)}M` : value >= 1e3 ? `${+(value / 1e3).toPrecision(3)}k` : `${+value.toPrecision(3)}`);

// Returns a sparkline of the values.
export function spark(values, label, cls = "ink") {
  const max = Math.max(...values, 1e-9);
  const at = (value, index) => `${((index / Math.max(1, values.length - 1)) * 100).toFixed(1)} ${(27 - (value / max) * 24).toFixed(1)}`;
  const line = values.map(at);
  return s("svg", { class: `spark ${cls}`, viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label },
    values.length > 1 && s("path", { class: "under", d: `M0 30L${line.join("L")}L100 30z` }),
    values.length > 1 && s("path", { class: "line", d: `M${line.join("L")}` }));
}

function frame({ title, label, top, step, unit, height, begin, width }, marks) {
  const y = (value) => height - BOTTOM - (value / top) * (height - TOP - BOTTOM);
  const grid = [];
  for (let value = 0; value <= top * 1.0001; value += step) {
    grid.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  const every = [5, 10, 15, 30, 60, 120].find((seconds) => begin / seconds <= 5) ?? 300;
  const ticks = [];
  for (let before = 0; before <= begin; before += every) {
    const x = LEFT + (1 - before / begin) * (width - LEFT - RIGHT);
    const text = before === 0 ? "now" : every >= 60 ? `−${before / 60} min` : `−${before} s`;
    if (before === 0 || x > LEFT + 24) ticks.push(s("text", { x, y: height - 6, "text-anchor": before === 0 ? "end" : "middle" }, text));
  }
  return h("figure", { class: "chart" },
    h("figcaption", {}, title, unit && h("span", { class: "soft" }, ` ${unit}`)),
    s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, grid, marks(y), ticks));
}

const xOf = (index, length, width) => LEFT + (index / Math.max(1, length - 1)) * (width - LEFT - RIGHT);

function legend(series) {
  return h("ul", { class: "legend" }, series.map(({ name, cls }) =>
    h("li", {}, s("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" }, s("rect", { y: 3, width: 10, height: 4, rx: 2, class: cls })), name)));
}

// Returns a chart with a line for each series of equally long values, one a second.
export function lines({ title, unit, series, height = 196, width = NARROW }) {
  const { top, step } = scale(Math.max(0, ...series.flatMap(({ values }) => values)));
  const length = series[0]?.values.length ?? 0;
  const label = `${title}: ${series.map(({ name, values }) => `${name} ${short(values.at(-1) ?? 0)} ${unit ?? ""}`).join(", ")}`;
  const chart = frame({ title, label, top, step, unit, height, width, begin: Math.max(1, length - 1) }, (y) =>
    series.map(({ values, cls }) => {
      // A gap where there is no value.
      let path = "", open = false;
      values.forEach((value, index) => {
        if (!value && unit === "ms") { open = false; return; }
        path += `${open ? "L" : "M"}${xOf(index, length, width).toFixed(1)} ${y(value).toFixed(1)}`;
        open = true;
      });
      return s("path", { class: `line ${cls}`, d: path || "M0 0" });
    }));
  chart.append(legend(series));
  return chart;
}

// Returns a chart with the series stacked on each other.
export function stacked({ title, unit, series, height = 196, isWide }) {
  const width = isWide && innerWidth > 720 ? WIDE : NARROW;
  const length = series[0]?.values.length ?? 0;
  const sums = Array.from({ length }, (_, index) => series.reduce((sum, { values }) => sum + values[index], 0));
  const { top, step } = scale(Math.max(0, ...sums));
  const label = `${title}: ${series.map(({ name, values }) => `${name} ${short(values.at(-1) ?? 0)} ${unit ?? ""}`).join(", ") || "no traffic"}`;
  const base = new Array(length).fill(0);
  const chart = frame({ title, label, top, step, unit, height, width, begin: Math.max(1, length - 1) }, (y) =>
    series.map(({ values, cls }) => {
      const lower = [...base];
      values.forEach((value, index) => { base[index] += value; });
      const point = (value, index) => `${xOf(index, length, width).toFixed(1)} ${y(value).toFixed(1)}`;
      const upper = base.map(point), under = lower.map(point).reverse();
      return length > 1 ? s("path", { class: `area ${cls}`, d: `M${upper.join("L")}L${under.join("L")}z` }) : undefined;
    }));
  chart.append(legend(series));
  return chart;
}
