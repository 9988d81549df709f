// World map: regions, gateways, and the traffic between them. The projection is Equal Earth, as that of the outline.

import { badge, byName, colour, columns, count, h, ms, rate, regionName, s } from "./dom.js";
import { discBox, place, regionBox } from "./labels.js";
import { LAND } from "./land.js";

const [A1, A2, A3, A4] = [1.340264, -0.081106, 0.000893, 0.003796];
const M = Math.sqrt(3) / 2, UNIT = 1000 / (2 * 2.70663);
// Time for which a failover or a spillover is shown after its last request.
const MOVE_SHOWN_MS = 6000;
// Radius of a region without traffic, and of one with the most.
const RADIUS_MIN = 5.5, RADIUS_MAX = 12.5;

// Returns the place of a point in a view of 1000 x 486.
export function project(lat, lon) {
  const t = Math.asin(M * Math.sin((lat * Math.PI) / 180)), t2 = t * t, t6 = t2 ** 3;
  const x = ((lon * Math.PI) / 180) * Math.cos(t) / (M * (A1 + 3 * A2 * t2 + t6 * (7 * A3 + 9 * A4 * t2)));
  return [500 + x * UNIT, 243 - t * (A1 + A2 * t2 + t6 * (A3 + A4 * t2)) * UNIT];
}

// Returns a curve between two points, bent to the north or, in the south, to the south.
function curve(from, to) {
  const distance = Math.hypot(to[0] - from[0], to[1] - from[1]);
  const south = (from[1] + to[1]) / 2 > 255 ? -1 : 1;
  return { from, control: [(from[0] + to[0]) / 2, (from[1] + to[1]) / 2 - south * distance * 0.22], to };
}

function pathOf({ from, control, to }) {
  const [[x1, y1], [cx, cy], [x2, y2]] = [from, control, to];
  // A gateway beside a region of its own city.
  if (Math.hypot(x2 - x1, y2 - y1) < 12) return `M${x1} ${y1}c-14-22 ${x2 - x1 + 14}-22 ${x2 - x1} ${y2 - y1}`;
  const text = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  return `M${text(from)}Q${text(control)} ${text(to)}`;
}

// Moves apart what would overlap: gateways lie beside a region of the same city.
function gatewayPoint(gateway, regions) {
  const [x, y] = project(gateway.lat, gateway.lon);
  const near = regions.some((region) => {
    const [rx, ry] = project(region.lat, region.lon);
    return Math.hypot(rx - x, ry - y) < 10;
  });
  return near ? [x - 13, y + 9] : [x, y];
}

// Rate and median latency, as the labels have them.
const figures = ({ rate: requests, p50_ms }) => `${rate(requests)}/s${p50_ms === undefined ? "" : ` · ${ms(p50_ms)}`}`;
// The same in words.
const spoken = ({ rate: requests, p50_ms }) => `${rate(requests)} requests/s${p50_ms === undefined ? "" : `, p50 ${ms(p50_ms)}`}`;

const stateOf = (region) => (region.state === "down" ? "down" : region.draining ? "draining" : region.state);

function regionText(region) {
  return `Region ${region.id}, ${region.city}: ${stateOf(region)}, ${spoken(region.traffic)}, ${region.ready} of ${region.target} replicas ready, ${count(region.pending_tokens)} queued tokens, zones ${region.zones.join(", ") || "none"}`;
}

function gatewayText(region, gateway) {
  return `Gateway ${region}, ${gateway.city}: ${gateway.lost ? "lost" : "reporting"}, ${spoken(gateway.traffic)}`;
}

function arcText(arc) {
  const state = arc.health === "healthy" ? "" : `, ${arc.health}`;
  return `Gateway ${arc.from} to region ${arc.to}: ${spoken(arc.traffic)}, round trip ${ms(arc.rtt_ms)}${state}`;
}

// Attributes of an element of the map that has a description: it is an image to screen readers. The map is one stop of the Tab key,
// and arrow keys move between its elements.
const item = (key, text, current) => ({ "data-key": key, role: "img", "aria-label": text, tabindex: key === current ? "0" : "-1" });

// What a region shows, and where.
function regionLabel(region, zone) {
  const [x, y] = project(region.lat, region.lon);
  const radius = RADIUS_MIN + Math.min(RADIUS_MAX - RADIUS_MIN, Math.sqrt(region.traffic.rate) / 3);
  const isLeft = x > 860, isInZone = Boolean(zone) && region.zones.includes(zone);
  const figure = region.state === "down" ? "down" : region.draining ? `draining · ${rate(region.traffic.rate)}/s` : figures(region.traffic);
  const beside = radius + (isInZone ? 11 : 5);
  return { region, x, y, radius, isLeft, isInZone, figure, zone: isInZone ? ` · ${zone}` : "", textX: isLeft ? x - beside : x + beside, anchor: isLeft ? "end" : "start" };
}

function regionMark(shown, current) {
  const { region, x, y, radius, textX, anchor } = shown;
  return s("g", { class: `mark ${region.draining ? "draining" : region.state}`, ...item(`region ${region.id}`, regionText(region), current), "data-region": region.id, "data-state": region.state, "data-zone": shown.isInZone },
    shown.isInZone && s("circle", { class: "zonering", cx: x, cy: y, r: radius + 7.5 }),
    s("circle", { class: "halo", cx: x, cy: y, r: radius + 3.5 }),
    s("circle", { class: `dot ${colour(region.id)}`, cx: x, cy: y, r: radius }),
    region.state === "down" && s("path", { class: "cross", d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8` }),
    s("text", { class: "city", x: textX, y: y - 1, "text-anchor": anchor }, region.city, shown.zone && s("tspan", { class: "zonename" }, shown.zone)),
    s("text", { class: "figure", x: textX, y: y + 11, "text-anchor": anchor }, shown.figure));
}

function kindOf(arc) {
  if (arc.health === "down") return "lost";
  if (arc.health === "suspect") return "suspect";
  return arc.traffic.rate >= 0.05 ? "busy" : "idle";
}

function arcMark({ key, arc, d, kind }, most, current) {
  const isBusy = arc.traffic.rate >= 0.05;
  const width = (isBusy ? 1.2 + 3.8 * Math.sqrt(arc.traffic.rate / most) : 0.8).toFixed(1);
  // One without traffic has nothing to say, unless it is the one that a person looks at.
  const described = kind !== "idle" || key === current ? item(key, arcText(arc), current) : { "data-key": key, "aria-hidden": "true" };
  return s("g", { class: `arc ${kind} ${colour(arc.to)}`, ...described, "data-from": arc.from, "data-to": arc.to, "data-rate": arc.traffic.rate, "data-health": arc.health },
    s("path", { class: "way", d, "stroke-width": width }),
    isBusy && kind !== "lost" && s("path", { class: "flow", d, "stroke-width": width }),
    kind !== "idle" && s("path", { class: "hit", d }));
}

// Label of an arc. It is drawn above all lines; screen readers have the description of the arc.
const arcLabel = ({ key, arc }, [x, y]) =>
  s("text", { class: "figure arclabel", "data-key": `label ${key}`, "data-from": arc.from, "data-to": arc.to, x: x.toFixed(1), y: (y + 4).toFixed(1), "text-anchor": "middle" }, figures(arc.traffic));

// Failovers and spillover of the last seconds, from the region that was left to the one that was used.
function moveMark(event, places) {
  const requests = `${count(event.requests)} request${event.requests === 1 ? "" : "s"}`;
  return s("g", { class: `move ${event.kind}`, "data-key": `move ${event.number}`, role: "img", "aria-label": `${event.kind === "failover" ? "Failover" : "Spillover"} from ${event.subject} to ${event.to}: ${requests}`, "data-from": event.subject, "data-to": event.to },
    s("path", { d: pathOf(curve(places.get(event.subject), places.get(event.to))), "marker-end": `url(#${event.kind}-head)` }));
}

// Returns the parts of the map that have a place.
function placed(snapshot) {
  const regions = snapshot.regions.filter((region) => region.city);
  const places = new Map(regions.map((region) => [region.id, project(region.lat, region.lon)]));
  const gateways = new Map();
  for (const gateway of snapshot.gateways) {
    // One mark for all gateways of a region, which is lost if all are.
    if (gateways.get(gateway.region)?.lost ?? true) gateways.set(gateway.region, gateway);
  }
  const starts = new Map([...gateways].map(([id, gateway]) => [id, gatewayPoint(gateway, regions)]));
  const arcs = byName(snapshot.arcs, (arc) => `${arc.from} ${arc.to}`).filter((arc) => starts.has(arc.from) && places.has(arc.to)).map((arc) => {
    const line = curve(starts.get(arc.from), places.get(arc.to));
    return { ...line, key: `arc ${arc.from} ${arc.to}`, arc, d: pathOf(line), kind: kindOf(arc) };
  });
  return { regions, places, gateways, starts, arcs };
}

// Returns the map. `zone` is the residency zone that is marked, and `inspected` what a person looks at.
export function map(snapshot, zone, inspected) {
  const { regions, places, gateways, starts, arcs } = placed(snapshot);
  const shown = byName(regions, ({ id }) => id).map((region) => regionLabel(region, zone));
  const keys = new Set([...shown.map(({ region }) => `region ${region.id}`), ...[...starts.keys()].map((id) => `gateway ${id}`), ...arcs.map(({ key }) => key)]);
  const current = keys.has(inspected.focused) ? inspected.focused : keys.values().next().value;
  const busy = arcs.filter(({ kind }) => kind === "busy");
  const taken = shown.map(({ region, x, y, zone, isLeft }) => regionBox([x, y], RADIUS_MAX + 4, region.city + zone, isLeft));
  const labels = place(busy, [...taken, ...[...starts.values()].map(([x, y]) => discBox(x, y, 7))]);
  const labelled = busy.filter(({ key }) => labels.has(key));
  const most = Math.max(1, ...snapshot.arcs.map((arc) => arc.traffic.rate));
  const moves = snapshot.events.filter((event) => ["failover", "spillover"].includes(event.kind) && snapshot.at_ms - event.last_ms < MOVE_SHOWN_MS && places.has(event.subject) && places.has(event.to));
  const down = regions.filter((region) => region.state === "down").map((region) => region.city);
  const label = `World map. ${regions.length} regions, ${down.length ? `${down.join(", ")} down` : "none down"}, ${rate(snapshot.total.rate)} requests per second. Arrow keys move between regions, gateways and arcs; the table below has the same data.`;
  const head = (kind) => s("marker", { id: `${kind}-head`, class: `head ${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" }, s("path", { d: "M0 0l8 4l-8 4z" }));
  return s("svg", { class: "map", viewBox: "60 4 900 424", role: "group", "aria-label": label },
    s("defs", {}, head("failover"), head("spillover")),
    s("path", { class: "land", transform: "scale(.5)", d: LAND, "aria-hidden": "true" }),
    s("g", {}, arcs.map((arc) => arcMark(arc, most, current))),
    s("g", {}, moves.map((event) => moveMark(event, places))), s("g", { "aria-hidden": "true" }, labelled.map((arc) => arcLabel(arc, labels.get(arc.key)))),
    [...starts].map(([id, [x, y]]) => s("g", { class: `gateway ${gateways.get(id).lost ? "lost" : ""}`, ...item(`gateway ${id}`, gatewayText(id, gateways.get(id)), current) },
      s("path", { d: `M${x} ${y - 6}l6 6l-6 6l-6-6z` }))),
    s("g", {}, shown.map((each) => regionMark(each, current))));
}

// Returns the description of what a person looks at, under the pointer or with the focus, with the newest values.
export function mapDetail(snapshot, { pointed, focused, hasFocus }) {
  const { regions, gateways, arcs } = placed(snapshot);
  const texts = new Map([...regions.map((region) => [`region ${region.id}`, regionText(region)]), ...[...gateways].map(([id, gateway]) => [`gateway ${id}`, gatewayText(id, gateway)]), ...arcs.map(({ key, arc }) => [key, arcText(arc)])]);
  const text = texts.get(pointed) ?? (hasFocus ? texts.get(focused) : undefined);
  return h("p", { class: `mapdetail ${text ? "" : "soft"}` }, text ?? "Point at a region, a gateway or an arc for its details, or move between them with the arrow keys.");
}

// Returns the element of the map to which a key moves the focus from `from`, or nothing: regions first, then gateways and arcs.
export function moveTo(key, from) {
  const shown = from.closest(".map");
  const items = [".mark", ".gateway", ".arc[tabindex]"].flatMap((kind) => [...shown.querySelectorAll(kind)]);
  const at = items.indexOf(from), last = items.length - 1;
  switch (key) {
    case "ArrowRight": case "ArrowDown": return items[Math.min(last, at + 1)];
    case "ArrowLeft": case "ArrowUp": return items[Math.max(0, at - 1)];
    case "Home": return items[0];
    case "End": return items[last];
    default: return undefined;
  }
}

// Returns the data of the map as a table.
export function mapTable(snapshot) {
  const state = (region) => (region.draining ? badge("draining", "warn") : badge(region.state, region.state === "healthy" ? "good" : region.state === "down" ? "bad" : "warn"));
  const byId = new Map(snapshot.regions.map((region) => [region.id, region]));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Traffic between gateways and regions" },
    h("table", {},
      h("caption", { class: "hidden" }, "Traffic from gateways to regions"),
      columns(["Gateway", "<Region", "<City", "<State", "<Zones", "Requests/s", "Failed/s", "p50", "p99", "Round trip"]),
      h("tbody", {}, byName(snapshot.arcs, (arc) => `${arc.from} ${arc.to}`).map((arc) => {
        const region = byId.get(arc.to);
        return h("tr", { "data-key": `${arc.from} ${arc.to}` },
          h("td", {}, arc.from), h("th", { scope: "row" }, regionName(arc.to)), h("td", { class: "left" }, region?.city), h("td", { class: "left" }, region && state(region)), h("td", { class: "left" }, region?.zones.join(", ")),
          h("td", {}, rate(arc.traffic.rate)), h("td", { class: arc.traffic.failed ? "bad" : "" }, rate(arc.traffic.failed)),
          h("td", {}, ms(arc.traffic.p50_ms)), h("td", {}, ms(arc.traffic.p99_ms)), h("td", {}, ms(arc.rtt_ms)));
      }))));
}
