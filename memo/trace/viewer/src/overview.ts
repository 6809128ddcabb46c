// The strip above the timeline: what the colours mean, the whole trace in small with the visible part to drag, and the
// buttons for the zoom.

import type { TimeAxis } from "./axis";
import type { Page } from "./data";
import { h } from "./dom";
import type { Store } from "./state";
import { laneColour, layerColour, theme } from "./theme";

const HEIGHT = 26; // pixels
const EDGE = 6; // pixels beside an end of the visible part that move this end alone
const NARROWEST = 8; // pixels; the visible part is drawn at least as wide
const ZOOM = 1.6;

interface Drag {
  kind: "move" | "from" | "to";
  x: number;
  shown: [number, number];
}

export class Overview {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private width = 0;
  private drag: Drag | null = null;

  constructor(private readonly page: Page, private readonly store: Store, private readonly axis: TimeAxis) {
    this.canvas = h("canvas", { class: "whole", role: "img", "aria-label": "The whole trace; drag the visible part" });
    this.element = h("div", { class: "overview" }, this.legend(), this.canvas, this.buttons());
    this.listen();
  }

  // The visible interval, the shown rank or the theme changed.
  draw(): void {
    const context = this.canvas.getContext("2d");
    if (!context || !this.width) return;
    const { page } = this;
    const colours = theme();
    context.globalAlpha = 1;
    context.fillStyle = colours.band;
    context.fillRect(0, 0, this.width, HEIGHT);
    const rank = page.ranks[this.store.now.rank];
    for (const row of rank.rows.filter((one) => page.raw.lanes[one.lane] === "compute")) {
      const phases = page.raw.phases.map((phase) => laneColour("compute", phase));
      let drawn = -1; // a pixel takes the first span that begins in it
      for (let i = 0; i < row.t.length; i++) {
        const [x, end] = [this.x(row.t[i]), this.x(row.end[i])];
        if (end <= drawn) continue;
        drawn = Math.max(end, x + 1);
        context.fillStyle = phases[row.phase[i]];
        context.fillRect(x, 4, drawn - x, HEIGHT - 8);
      }
    }
    const [left, right] = this.span();
    context.fillStyle = colours.background;
    context.globalAlpha = 0.65;
    context.fillRect(0, 0, left, HEIGHT);
    context.fillRect(right, 0, this.width - right, HEIGHT);
    context.globalAlpha = 1;
    context.strokeStyle = colours.text;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 0.75, Math.max(right - left - 1.5, 1), HEIGHT - 1.5);
    Object.assign(this.canvas.dataset, { left: String(left), right: String(right) });
  }

  private x(t: number): number {
    return ((t - this.page.begin) / Math.max(this.page.end - this.page.begin, 1)) * this.width;
  }

  private t(x: number): number {
    return this.page.begin + (x / Math.max(this.width, 1)) * (this.page.end - this.page.begin);
  }

  // Pixels of the visible part.
  private span(): [number, number] {
    const [from, to] = this.axis.domain;
    const [left, right] = [this.x(from), this.x(to)];
    const wider = Math.max(0, NARROWEST - (right - left)) / 2;
    const start = Math.max(0, Math.min(left - wider, this.width - NARROWEST));
    return [start, Math.min(this.width, Math.max(right + wider, start + NARROWEST))];
  }

  private legend(): HTMLElement {
    const { page } = this;
    const lanes = new Set(page.ranks.flatMap((rank) => rank.rows.map((row) => page.raw.lanes[row.lane])));
    const phases = new Set<number>();
    for (const rank of page.ranks) {
      for (const row of rank.rows) if (page.raw.lanes[row.lane] === "compute") for (const phase of row.phase) phases.add(phase);
    }
    const named = ["forward", "backward", "optimizer"].filter((phase) => phases.has(page.raw.phases.indexOf(phase)));
    const keys = named.map((phase) => key(phase, [laneColour("compute", phase)]));
    if (lanes.has("recompute")) keys.push(key("recompute", [laneColour("recompute", "")]));
    if (page.layers.size > 1) keys.push(key("layers, first to last", [0, 1, 2, 3, 4].map((place) => layerColour(place, 5))));
    return h("div", { class: "legend", id: "legend" }, ...keys);
  }

  private buttons(): HTMLElement {
    const make = (id: string, text: string, label: string, act: () => void): HTMLElement => {
      const button = h("button", { type: "button", id, title: label, "aria-label": label }, text);
      button.addEventListener("click", act);
      return button;
    };
    const other = make("other", "Other", "Show or hide other memory (o)", () => this.store.set({ other: !this.store.now.other }));
    other.hidden = !this.page.ranks.some((rank) => rank.tiers.some((tier) => tier.layers.some((band) => this.page.name(band) === "other")));
    const mark = (): void => other.setAttribute("aria-pressed", String(this.store.now.other));
    this.store.watch(mark);
    mark();
    const fit = (): void => this.axis.show(this.page.begin, this.page.end);
    return h(
      "span",
      { class: "zoom", role: "group", "aria-label": "Zoom" },
      make("zoom-in", "+", "Zoom in (w)", () => this.axis.zoomBy(ZOOM, null)),
      make("zoom-out", "\u2212", "Zoom out (s)", () => this.axis.zoomBy(1 / ZOOM, null)),
      make("zoom-fit", "Fit", "Show the whole trace (0)", fit),
      other,
    );
  }

  private listen(): void {
    const { canvas } = this;
    const at = (event: PointerEvent): number => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointerdown", (event) => {
      const x = at(event);
      const [left, right] = this.span();
      if (x < left - EDGE || x > right + EDGE) {
        const half = (this.axis.domain[1] - this.axis.domain[0]) / 2;
        this.show(this.t(x) - half, this.t(x) + half);
      }
      const inner = right - left > 4 * EDGE;
      const kind = inner && Math.abs(x - left) <= EDGE ? "from" : inner && Math.abs(x - right) <= EDGE ? "to" : "move";
      this.drag = { kind, x, shown: [...this.axis.domain] };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.drag) return;
      const by = this.t(at(event)) - this.t(this.drag.x);
      const [from, to] = this.drag.shown;
      if (this.drag.kind === "move") this.show(from + by, to + by);
      else if (this.drag.kind === "from") this.axis.show(Math.max(this.page.begin, Math.min(from + by, to - 1000)), to);
      else this.axis.show(from, Math.min(this.page.end, Math.max(to + by, from + 1000)));
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.drag = null));
    new ResizeObserver(() => this.layout()).observe(canvas);
    this.store.watch((change) => {
      if ("rank" in change) this.draw();
    });
  }

  // Moves the visible part, which keeps its width at both ends of the trace.
  private show(from: number, to: number): void {
    const wide = to - from;
    const start = Math.max(this.page.begin, Math.min(from, this.page.end - wide));
    this.axis.show(start, start + wide);
  }

  private layout(): void {
    this.width = Math.floor(this.canvas.getBoundingClientRect().width);
    const density = window.devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [Math.round(this.width * density), Math.round(HEIGHT * density)];
    this.canvas.getContext("2d")?.setTransform(density, 0, 0, density, 0, 0);
    this.draw();
  }
}

function key(text: string, colours: string[]): HTMLElement {
  const patch = h("canvas", { width: String(colours.length > 1 ? 30 : 10), height: "10" });
  const context = patch.getContext("2d");
  const wide = patch.width / colours.length;
  colours.forEach((colour, i) => {
    if (!context) return;
    context.fillStyle = colour;
    context.fillRect(i * wide, 0, wide, 10);
  });
  return h("span", { class: "key" }, patch, text);
}
