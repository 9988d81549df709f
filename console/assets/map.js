// World map: regions, gateways, and the traffic between them. The projection is Equal Earth, as that of the outline.

import { badge, byName, colour, columns, h, ms, rate, regionName, s } from "./dom.js";
import { LAND } from "./land.js";

const [A1, A2, A3, A4] = [1.340264, -0.081106, 0.000893, 0.003796];
const M = Math.sqrt(3) / 2, UNIT = 1000 / (2 * 2.70663);

// Returns the place of a point in a view of 1000 x 486.
export function project(lat, lon) {
  const t = Math.asin(M * Math.sin((lat * Math.PI) / 180)), t2 = t * t, t6 = t2 ** 3;
  const x = ((lon * Math.PI) / 180) * Math.cos(t) / (M * (A1 + 3 * A2 * t2 + t6 * (7 * A3 + 9 * A4 * t2)));
  return [500 + x * UNIT, 243 - t * (A1 + A2 * t2 + t6 * (A3 + A4 * t2)) * UNIT];
}

// Returns a curve between two points, bent to the north or, in the south, to the south.
function curve([x1, y1], [x2, y2]) {
  const distance = Math.hypot(x2 - x1, y2 - y1);
  if (distance < 12) {
    // A gateway beside a region of its own city.
    return `M${x1} ${y1}c-14-22 ${x2 - x1 + 14}-22 ${x2 - x1} ${y2 - y1}`;
  }
  const south = (y1 + y2) / 2 > 255 ? -1 : 1;
  const [cx, cy] = [(x1 + x2) / 2, (y1 + y2) / 2 - south * distance * 0.22];
  return `M${x1.toFixed(1)} ${y1.toFixed(1)}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`;
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

function regionMark(region, number) {
  const [x, y] = project(region.lat, region.lon);
  const state = region.draining ? "draining" : region.state;
  const radius = 5.5 + Math.min(7, Math.sqrt(region.traffic.rate) / 3);
  const label = region.state === "down" ? "down" : region.draining ? `draining · ${rate(region.traffic.rate)}/s` : `${rate(region.traffic.rate)}/s`;
  const left = x > 860;
  const [lx, anchor] = left ? [x - radius - 5, "end"] : [x + radius + 5, "start"];
  return s("g", { class: `mark ${state}`, "data-key": `region ${region.id}`, "data-region": region.id, "data-state": region.state },
    s("circle", { class: "halo", cx: x, cy: y, r: radius + 3.5 }),
    s("circle", { class: `dot ${colour(region.id)}`, cx: x, cy: y, r: radius }),
    region.state === "down" && s("path", { class: "cross", d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8` }),
    s("text", { class: "city", x: lx, y: y - 1, "text-anchor": anchor }, region.city),
    s("text", { class: "figure", x: lx, y: y + 11, "text-anchor": anchor }, label));
}

// Returns the map.
export function map(snapshot) {
  const regions = snapshot.regions.filter((region) => region.city);
  const places = new Map(regions.map((region) => [region.id, project(region.lat, region.lon)]));
  const gateways = new Map();
  for (const gateway of snapshot.gateways) {
    // One mark for all gateways of a region, which is lost if all are.
    if (gateways.get(gateway.region)?.lost ?? true) gateways.set(gateway.region, gateway);
  }
  const starts = new Map([...gateways].map(([id, gateway]) => [id, gatewayPoint(gateway, regions)]));
  const most = Math.max(1, ...snapshot.arcs.map((arc) => arc.traffic.rate));
  const arcs = snapshot.arcs.filter((arc) => starts.has(arc.from) && places.has(arc.to)).map((arc) => {
    const d = curve(starts.get(arc.from), places.get(arc.to));
    const busy = arc.traffic.rate >= 0.05;
    const width = busy ? 1.2 + 3.8 * Math.sqrt(arc.traffic.rate / most) : 0.8;
    const kind = arc.health === "down" ? "lost" : arc.health === "suspect" ? "suspect" : busy ? "busy" : "idle";
    return s("g", { class: `arc ${kind} ${colour(arc.to)}`, "data-key": `arc ${arc.from} ${arc.to}`, "data-from": arc.from, "data-to": arc.to, "data-rate": arc.traffic.rate, "data-health": arc.health },
      s("path", { class: "way", d, "stroke-width": width.toFixed(1) }),
      busy && kind !== "lost" && s("path", { class: "flow", d, "stroke-width": width.toFixed(1) }));
  });
  const now = snapshot.at_ms;
  const moves = snapshot.events.filter((event) => ["failover", "spillover"].includes(event.kind) && now - event.last_ms < 6000);
  const moved = moves.filter((event) => places.has(event.subject) && places.has(event.to)).map((event) =>
    s("g", { class: `move ${event.kind}`, "data-key": `move ${event.number}`, "data-from": event.subject, "data-to": event.to },
      s("path", { d: curve(places.get(event.subject), places.get(event.to)), "marker-end": `url(#${event.kind}-head)` })));
  const down = regions.filter((region) => region.state === "down").map((region) => region.city);
  const label = `World map. ${regions.length} regions, ${down.length ? `${down.join(", ")} down` : "none down"}, ${rate(snapshot.total.rate)} requests per second. The table below has the same data.`;
  const head = (kind) => s("marker", { id: `${kind}-head`, class: `head ${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" }, s("path", { d: "M0 0l8 4l-8 4z" }));
  return s("svg", { class: "map", viewBox: "60 4 900 424", role: "img", "aria-label": label },
    s("defs", {}, head("failover"), head("spillover")),
    s("path", { class: "land", transform: "scale(.5)", d: LAND }),
    s("g", {}, arcs), s("g", {}, moved),
    [...starts].map(([id, [x, y]]) => s("g", { class: `gateway ${gateways.get(id).lost ? "lost" : ""}`, "data-key": `gateway ${id}` },
      s("path", { d: `M${x} ${y - 6}l6 6l-6 6l-6-6z` }))),
    s("g", {}, regions.map(regionMark)));
}

// Returns the data of the map as a table.
export function mapTable(snapshot) {
  const state = (region) => (region.draining ? badge("draining", "warn") : badge(region.state, region.state === "healthy" ? "good" : region.state === "down" ? "bad" : "warn"));
  const byId = new Map(snapshot.regions.map((region) => [region.id, region]));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Traffic between gateways and regions" },
    h("table", {},
      h("caption", { class: "hidden" }, "Traffic from gateways to regions"),
      columns(["Gateway", "<Region", "<City", "<State", "Requests/s", "Failed/s", "p50", "p99", "Round trip"]),
      h("tbody", {}, byName(snapshot.arcs, (arc) => `${arc.from} ${arc.to}`).map((arc) => {
        const region = byId.get(arc.to);
        return h("tr", { "data-key": `${arc.from} ${arc.to}` },
          h("td", {}, arc.from), h("th", { scope: "row" }, regionName(arc.to)), h("td", { class: "left" }, region?.city), h("td", { class: "left" }, region && state(region)),
          h("td", {}, rate(arc.traffic.rate)), h("td", { class: arc.traffic.failed ? "bad" : "" }, rate(arc.traffic.failed)),
          h("td", {}, ms(arc.traffic.p50_ms)), h("td", {}, ms(arc.traffic.p99_ms)), h("td", {}, ms(arc.rtt_ms)));
      }))));
}
