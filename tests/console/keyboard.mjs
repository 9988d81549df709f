// What a person does who has no pointer. The tests of the console share it.

import assert from "node:assert/strict";

// More elements than any page of the tests has.
const PRESSES_MAX = 100;

// Returns whether the element with the focus matches.
export const hasFocus = (page, selector) => page.evaluate((selector) => document.activeElement.matches(selector), selector);

// Presses Tab, or another key, until the element that matches has the focus.
export async function tabTo(page, selector, key = "Tab") {
  for (let presses = 0; presses < PRESSES_MAX; presses++) {
    await page.keyboard.press(key);
    if (await hasFocus(page, selector)) return;
  }
  assert.fail(`${key} does not reach ${selector}`);
}
