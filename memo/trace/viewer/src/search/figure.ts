// Parts that several figures of the page have: vector elements, legends, a tip beside the pointer.

import { h } from "../dom";

const SVG = "http://www.w3.org/2000/svg";

export function v(tag: string, attributes: Record<string, string | number> = {}, ...children: (Node | string)[]): SVGElement {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export function swatch(colour: string): HTMLElement {
  const found = h("span", { class: "swatch" });
  found.style.background = colour;
  return found;
}

export function legend(keys: [string, string][]): HTMLElement {
  return h("div", { class: "legend" }, ...keys.map(([text, colour]) => h("span", { class: "key" }, swatch(colour), text)));
}

// A tip in a figure, beside a point of it.
export class Tip {
  readonly element = h("div", { class: "tip", role: "tooltip", hidden: "" });

  show(text: string, x: number, y: number): void {
    this.element.textContent = text;
    this.element.hidden = false;
    const room = (this.element.parentElement?.clientWidth ?? 0) - this.element.offsetWidth;
    this.element.style.transform = `translate(${Math.max(0, Math.min(x + 14, room))}px, ${y + 16}px)`;
  }

  hide(): void {
    this.element.hidden = true;
  }
}

// Draws again whenever the width of an element changes.
export function onWidth(element: HTMLElement, draw: (width: number) => void): void {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(element.getBoundingClientRect().width);
    if (width && width !== last) draw((last = width));
  }).observe(element);
}
