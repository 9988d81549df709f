// Elements, and the update of a page in place: a page is built anew from each snapshot and morphed into the shown one, so that
// focus, scroll positions and open details stay.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== undefined && child !== null && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
}

// Returns an HTML element.
export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);

// Returns an SVG element.
export const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// What a person changes in the shown page, which an update leaves as it is.
const OWN = new Set(["open"]);

const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);

function isSame(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);
}

// Changes `shown` into `next`.
export function morph(shown, next) {
  if (shown.nodeType === Node.TEXT_NODE) {
    if (shown.data !== next.data) shown.data = next.data;
    return;
  }
  for (const { name, value } of next.attributes) {
    if (!OWN.has(name) && shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  }
  for (const { name } of [...shown.attributes]) {
    if (!OWN.has(name) && !next.hasAttribute(name)) shown.removeAttribute(name);
  }
  morphChildren(shown, next);
}

// Changes the children of `shown` into those of `next`.
export function morphChildren(shown, next) {
  const keyed = new Map();
  for (const child of shown.childNodes) {
    const key = keyOf(child);
    if (key !== null) keyed.set(key, child);
  }
  let at = shown.firstChild;
  for (const wanted of [...next.childNodes]) {
    const key = keyOf(wanted);
    const found = key === null ? at : keyed.get(key);
    if (found && isSame(found, wanted)) {
      if (found !== at) shown.insertBefore(found, at);
      else at = at.nextSibling;
      morph(found, wanted);
    } else {
      shown.insertBefore(wanted, at);
    }
  }
  while (at) {
    const rest = at.nextSibling;
    at.remove();
    at = rest;
  }
}

// Formats a rate per second.
export function rate(value) {
  if (!value) return "0";
  if (value < 0.1) return "<0.1";
  if (value < 10) return value.toFixed(1);
  return count(value);
}

// Formats a count.
export function count(value) {
  if (value < 10_000) return Math.round(value).toLocaleString("en-US");
  // What rounds to 1,000 of a unit is 1 of the next one.
  const units = [[1e3, "k"], [1e6, "M"], [1e9, "G"]];
  const [unit, name] = units.find(([unit]) => value < 999.5 * unit) ?? [1e12, "T"];
  return `${(value / unit).toPrecision(3)} ${name}`;
}

// Formats milliseconds.
export function ms(value) {
  if (value === undefined || value === null) return "–";
  if (value < 1) return `${value.toFixed(1)} ms`;
  return value < 10_000 ? `${Math.round(value).toLocaleString("en-US")} ms` : `${(value / 1e3).toFixed(1)} s`;
}

// Formats a time, with the date if that is not today.
export function clock(at) {
  const time = new Date(at), text = time.toLocaleTimeString("en-GB");
  if (time.toDateString() === new Date().toDateString()) return text;
  return `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })}, ${text}`;
}

// Formats a time before now.
export function ago(at, now) {
  const seconds = Math.max(0, Math.round((now - at) / 1e3));
  if (seconds < 2) return "now";
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 48 * 3600 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86_400)} days ago`;
}

// Classes of the colours of the regions. The hub sends them, so that a region has the colour that it has in reports and plots.
let classes = {};
export const setColours = (colours) => { classes = colours; };

// Returns the class of the colour of a region.
export const colour = (region) => classes[region] ?? "ink";

// Sorts rows by name: in the order of their rates, in which the hub sends them, they would change places under the pointer.
export const byName = (rows, name) => [...rows].sort((one, other) => (name(one) < name(other) ? -1 : name(one) > name(other) ? 1 : 0));

// Head of a table; names that begin with `<` are those of columns of text.
export const columns = (names) => h("thead", {}, h("tr", {}, names.map((name) =>
  h("th", { scope: "col", class: name.startsWith("<") ? "left" : null }, name.replace("<", "")))));

// Swatch with the name of a region.
export const regionName = (id) =>
  h("span", { class: "region" }, s("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" },
    s("circle", { cx: 5, cy: 5, r: 4.5, class: colour(id) })), id);

// Badge with a state.
export const badge = (text, kind) => h("span", { class: `badge ${kind ?? ""}` }, text);

// Horizontal bar of a share from 0 to 1, with an optional mark.
export function bar(share, label, kind) {
  const width = Math.round(Math.min(1, Math.max(0, share)) * 100);
  return s("svg", { class: `bar ${kind ?? ""}`, viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("rect", { class: "track", width: 100, height: 8 }), s("rect", { class: "value", width, height: 8 }));
}
