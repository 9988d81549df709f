// Residency zones on the map: one at a time is chosen above it, and is part of the address.

import { h } from "./dom.js";

// Codes of jurisdictions, as the hub writes them. Another text in the address chooses nothing.
const CODE = /^[a-z0-9]{1,8}(-[a-z0-9]{1,8})?$/;

// Returns the zone that the parameters of an address choose, or nothing.
export function zoneOf(parameters) {
  const zone = parameters.get("zone") ?? "";
  return CODE.test(zone) ? zone : "";
}

// Returns the address of the map with this zone.
export const addressOf = (zone) => (zone ? `#/?zone=${zone}` : "#/");

const inZone = (snapshot, zone) => snapshot.regions.filter((region) => region.zones.includes(zone));

const number = (regions) => (regions.length === 1 ? "1 region" : `${regions.length} regions`);

// Returns the control. The regions of the zone are stated next to it, and read aloud when another zone is chosen.
export function zoneControl(snapshot, zone) {
  const known = new Set(snapshot.regions.flatMap((region) => region.zones));
  // A zone of an old address is shown too, with no regions.
  if (zone) known.add(zone);
  const option = (value, text) => h("option", { value, selected: value === zone, "data-key": value }, text);
  const regions = inZone(snapshot, zone);
  const found = regions.length ? `${number(regions)} of ${snapshot.regions.length}: ${regions.map((region) => `${region.city || region.id} (${region.id})`).sort().join(", ")}` : `No region is in ${zone}.`;
  return h("div", { class: "zones" },
    h("label", { for: "map-zone" }, "Residency zone"),
    h("select", { id: "map-zone", "data-action": "zone", "data-value": zone }, option("", "off"), [...known].sort().map((each) => option(each, `${each} (${number(inZone(snapshot, each))})`))),
    h("output", { for: "map-zone", class: "soft" }, zone && found));
}
