// Labels of the map: each arc has one near its middle where there is room. Whether there is room depends on the places of the regions
// and not on the rates, so labels do not come and go as rates change.

// Width of a character and height of a line of the map's text, in units of its view.
const CHARACTER = 6.2, LINE = 12;
// An arc that is shorter has no room for a label beside those of its ends.
const DISTANCE_MIN = 70;
// Parts of the way along the arc at which a label is tried.
const PLACES = [0.5, 0.42, 0.58, 0.34, 0.66, 0.28, 0.72];
// Width for which room is kept, so that a label stays where it is while its numbers change.
const RESERVED = "000/s · 0,000 ms".length * CHARACTER;

const overlaps = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;

// Returns the box of a text whose baseline is at `y`.
export function textBox(x, y, text, anchor) {
  const width = text.length * CHARACTER, left = anchor === "end" ? x - width : anchor === "middle" ? x - width / 2 : x;
  return { left, right: left + width, top: y - LINE + 2, bottom: y + 3 };
}

// Returns the box of a disc.
export const discBox = (x, y, radius) => ({ left: x - radius, right: x + radius, top: y - radius, bottom: y + radius });

// Returns the point of a quadratic curve at `t` from 0 to 1.
function pointAt({ from, control, to }, t) {
  const at = (axis) => (1 - t) ** 2 * from[axis] + 2 * t * (1 - t) * control[axis] + t ** 2 * to[axis];
  return [at(0), at(1)];
}

// Returns the places of the labels by key. `arcs` are quadratic curves with a key, and `taken` is where nothing may be covered. Of arcs
// that are in each other's way the longest has its label.
export function place(arcs, taken) {
  const boxes = [...taken], placed = new Map();
  const length = ({ from, to }) => Math.hypot(to[0] - from[0], to[1] - from[1]);
  const sorted = arcs.filter((arc) => length(arc) >= DISTANCE_MIN).sort((one, other) => length(other) - length(one) || (one.key < other.key ? -1 : 1));
  for (const arc of sorted) {
    for (const t of PLACES) {
      const [x, y] = pointAt(arc, t);
      const box = { left: x - RESERVED / 2, right: x + RESERVED / 2, top: y - LINE / 2, bottom: y + LINE / 2 };
      if (boxes.some((other) => overlaps(box, other))) continue;
      boxes.push(box);
      placed.set(arc.key, [x, y]);
      break;
    }
  }
  return placed;
}
