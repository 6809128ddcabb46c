// Keyboard as in Perfetto: w and s zoom, a and d move, held keys move smoothly.

import { h, table } from "./dom";

export interface Moves {
  pan(pixels: number): void;
  zoomBy(factor: number): void;
  once: Record<string, () => void>;
}

const LIST = [
  ["w  s", "zoom in, out"],
  ["a  d", "left, right"],
  ["wheel, drag", "zoom, move"],
  ["click, double click", "select, zoom to it"],
  ["f", "zoom to the selection"],
  ["0", "the whole trace"],
  ["[  ]", "step before, after"],
  ["/", "search; Enter: next match"],
  ["o", "show or hide other memory"],
  ["Esc", "clear search and selection"],
  ["shift + wheel", "scroll, when all ranks are shown"],
  ["?", "this list"],
];

// The list of the keys, over the page until Esc or a click closes it.
export function keysDialog(): HTMLDialogElement {
  const close = h("button", { type: "button" }, "Close");
  const dialog = h("dialog", { id: "keys" }, table("Keys", ["", ""], LIST), close);
  dialog.addEventListener("click", () => dialog.close());
  return dialog;
}

const PAN = 900; // pixels a second
const ZOOM = 6; // times a second

const HELD: Record<string, { pan?: number; zoom?: number }> = {
  a: { pan: -PAN },
  d: { pan: PAN },
  arrowleft: { pan: -PAN },
  arrowright: { pan: PAN },
  w: { zoom: ZOOM },
  s: { zoom: 1 / ZOOM },
  arrowup: { zoom: ZOOM },
  arrowdown: { zoom: 1 / ZOOM },
};

export function listenToKeys(moves: Moves): void {
  const down = new Set<string>();
  let last = 0;

  const frame = (now: number): void => {
    if (!down.size) return;
    const seconds = Math.min(0.1, (now - last) / 1000);
    last = now;
    for (const key of down) {
      const { pan, zoom } = HELD[key];
      if (pan) moves.pan(pan * seconds);
      if (zoom) moves.zoomBy(zoom ** seconds);
    }
    requestAnimationFrame(frame);
  };

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const key = event.key.toLowerCase();
    if (key in HELD) {
      event.preventDefault();
      if (!down.size) {
        last = performance.now();
        requestAnimationFrame(frame);
      }
      down.add(key);
    } else if (Object.hasOwn(moves.once, key)) {
      event.preventDefault();
      moves.once[key]();
    }
  });
  addEventListener("keyup", (event) => down.delete(event.key.toLowerCase()));
  addEventListener("blur", () => down.clear());
}

function isTyping(target: EventTarget | null): boolean {
  if (target instanceof Element && target.closest("dialog")) return true;
  return target instanceof HTMLInputElement || target instanceof HTMLSelectElement || target instanceof HTMLTextAreaElement;
}
