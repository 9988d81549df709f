// Labels of the map: each arc with traffic has one near its middle where there is room. Whether there is room does not depend on how high
// the rates are, so labels do not come and go as rates change.

// Width of a character, also of a bold one, and height of a line of the map's text, in units of its view.
const CHARACTER = 7, LINE = 12;
// An arc that is shorter has no room for a label beside those of its ends.
const DISTANCE_MIN = 70;
// Parts of the way along the arc at which a label is tried.
const PLACES = [0.5, 0.42, 0.58, 0.34, 0.66, 0.28, 0.72];
// Width for which room is kept: that of `100/s · 100 ms`.
const RESERVED = 84;

const overlaps = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;

// Returns the box of a disc.
export const discBox = (x, y, radius) => ({ left: x - radius, right: x + radius, top: y - radius, bottom: y + radius });

// Returns the box of a region whose disc is around a point, and whose name and figures are to the right or the left of it.
export function regionBox([x, y], radius, name, isLeft) {
  const side = radius + Math.max(name.length * CHARACTER, RESERVED);
  return { left: x - (isLeft ? side : radius), right: x + (isLeft ? radius : side), top: y - LINE - 1, bottom: y + LINE + 4 };
}

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
      const box = { left: x - RESERVED / 2, right: x + RESERVED / 2, top: y - LINE / 2 - 2, bottom: y + LINE / 2 + 2 };
      if (boxes.some((other) => overlaps(box, other))) continue;
      boxes.push(box);
      placed.set(arc.key, [x, y]);
      break;
    }
  }
  return placed;
}
