// The page of memo pack --plot: an address plan as a picture, time across and address up, one rectangle a buffer.

import { scaleLinear, type ScaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomTransform } from "d3-zoom";
import type { Packing, PlanBuffer } from "./data";
import { h, table } from "./dom";
import { bytes, count, percent, printable } from "./format";
import { fit } from "./lanes";
import { inkOn, layerColour, theme } from "./theme";

const LEFT = 72;
const BOTTOM = 24;
const TOP = 10;

class PackingView {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly context: CanvasRenderingContext2D;
  private readonly facts: HTMLElement;
  private plan: Packing;
  private end = 1;
  private top = 1;
  private x: ScaleLinear<number, number> = scaleLinear();
  private y: ScaleLinear<number, number> = scaleLinear();
  private transform: ZoomTransform = zoomIdentity;
  private selected: PlanBuffer | null = null;
  private width = 1;
  private height = 1;
  private asked = false;

  constructor(plans: Packing[]) {
    [this.plan] = plans;
    this.canvas = h("canvas", { class: "plot", role: "img", "aria-label": "Addresses over time" });
    this.facts = h("div", { class: "body" });
    const stage = h("div", { class: "timeline" }, this.canvas);
    const arenas = plans.length > 1 ? this.arenaSelect(plans) : null;
    this.element = h("div", { class: "packing" }, stage, h("aside", { class: "panel" }, arenas, this.facts));
    const context = this.canvas.getContext("2d", { alpha: false });
    if (!context) throw new Error("no canvas");
    this.context = context;
    const behavior = zoom<HTMLCanvasElement, unknown>()
      .scaleExtent([1, 1e5])
      .clickDistance(4)
      .on("zoom", (event: { transform: ZoomTransform }) => {
        this.transform = event.transform;
        this.redraw();
      });
    select(this.canvas).call(behavior);
    this.canvas.addEventListener("click", (event) => this.choose(event));
    new ResizeObserver(() => this.layout(stage)).observe(stage);
    this.show(this.plan);
  }

  private show(plan: Packing): void {
    this.plan = plan;
    this.selected = null;
    this.end = plan.buffers.reduce((end, one) => Math.max(end, one.end), 1);
    this.top = Math.max(plan.peak_nbytes, 1);
    this.tell();
    this.redraw();
  }

  private arenaSelect(packing: Packing[]): HTMLElement {
    const options = packing.map((one, i) => h("option", { value: String(i) }, printable(one.arena)));
    const choice = h("select", { id: "arena", "aria-label": "Arena" }, ...options);
    choice.addEventListener("change", () => this.show(packing[Number(choice.value)]));
    return choice;
  }

  private redraw(): void {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  private layout(stage: HTMLElement): void {
    const box = stage.getBoundingClientRect();
    if (box.width < 1 || box.height < 1) return;
    const density = window.devicePixelRatio || 1;
    [this.width, this.height] = [Math.floor(box.width), Math.floor(box.height)];
    this.canvas.width = Math.round(this.width * density);
    this.canvas.height = Math.round(this.height * density);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(density, 0, 0, density, 0, 0);
    this.redraw();
  }

  private draw(): void {
    const { context } = this;
    const colours = theme();
    const right = this.width - 10;
    const floor = this.height - BOTTOM;
    this.x = this.transform.rescaleX(scaleLinear().domain([0, this.end]).range([LEFT, right]));
    this.y = this.transform.rescaleY(scaleLinear().domain([0, this.top * 1.02]).range([floor, TOP]));
    context.fillStyle = colours.background;
    context.fillRect(0, 0, this.width, this.height);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, right - LEFT, floor - TOP);
    context.clip();
    context.fillStyle = colours.band;
    context.fillRect(LEFT, TOP, right - LEFT, floor - TOP);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.plan.buffers.forEach((buffer, i) => this.drawBuffer(buffer, i));
    this.drawLine(this.plan.peak_nbytes, colours.text, []);
    this.drawLine(this.plan.lower_bound_nbytes, colours.plan, [5, 4]);
    this.drawLine(this.plan.capacity_nbytes, colours.budget, []);
    context.restore();
    this.drawAxes(right, floor);
  }

  private drawBuffer(buffer: PlanBuffer, i: number): void {
    const { context } = this;
    const x0 = this.x(buffer.start);
    const x1 = this.x(buffer.end);
    const y0 = this.y(buffer.offset + buffer.nbytes);
    const y1 = this.y(buffer.offset);
    if (x1 < LEFT || x0 > this.width || y1 < 0 || y0 > this.height) return;
    const colour = layerColour((i * 7) % 17, 17);
    context.globalAlpha = 0.9;
    context.fillStyle = colour;
    const [width, height] = [Math.max(x1 - x0, 0.7), Math.max(y1 - y0, 0.7)];
    context.fillRect(x0, y0, width, height);
    context.globalAlpha = 1;
    if (width > 3 && height > 3) {
      context.strokeStyle = theme().background;
      context.lineWidth = 0.75;
      context.strokeRect(x0, y0, width, height);
    }
    if (buffer === this.selected) {
      context.strokeStyle = theme().stall;
      context.lineWidth = 2.5;
      context.strokeRect(x0, y0, width, height);
    }
    const text = height > 12 && width > 30 ? fit(printable(buffer.name), Math.floor((width - 6) / 6.1)) : "";
    if (text) {
      context.fillStyle = inkOn(colour);
      context.fillText(text, Math.max(x0, LEFT) + 3, (y0 + y1) / 2);
    }
  }

  private drawLine(nbytes: number | null, colour: string, dash: number[]): void {
    if (nbytes === null) return;
    const { context } = this;
    const at = Math.round(this.y(nbytes)) + 0.5;
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(LEFT, at);
    context.lineTo(this.width, at);
    context.stroke();
    context.setLineDash([]);
  }

  private drawAxes(right: number, floor: number): void {
    const { context } = this;
    context.fillStyle = theme().faint;
    context.textAlign = "right";
    const [low, high] = this.y.domain();
    const step = binaryStep((high - low) / 8);
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
      const y = this.y(at);
      if (y > TOP + 4 && y <= floor) context.fillText(bytes(at), LEFT - 6, y);
    }
    context.textAlign = "center";
    for (const tick of this.x.ticks(8)) {
      const x = this.x(tick);
      if (x >= LEFT && x < right - 20) context.fillText(count(tick), x, floor + 13);
    }
    context.textAlign = "left";
    context.fillText(this.plan.unit, 8, floor + 13);
  }

  private choose(event: MouseEvent): void {
    const box = this.canvas.getBoundingClientRect();
    const t = this.x.invert(event.clientX - box.left);
    const address = this.y.invert(event.clientY - box.top);
    this.selected =
      this.plan.buffers.find(
        (one) => one.start <= t && t < one.end && one.offset <= address && address < one.offset + one.nbytes,
      ) ?? null;
    this.tell();
    this.redraw();
  }

  private tell(): void {
    const { plan, selected } = this;
    const waste = plan.lower_bound_nbytes ? percent(100 * (plan.peak_nbytes / plan.lower_bound_nbytes - 1)) : "–";
    const rows: [string, string][] = [
      ["plan", printable(plan.title)],
      ["arena", printable(plan.arena)],
      ["status", printable(plan.status)],
      ["buffers", count(plan.buffers.length)],
      ["peak", bytes(plan.peak_nbytes)],
      ["lower bound", plan.lower_bound_nbytes === null ? "–" : bytes(plan.lower_bound_nbytes)],
      ["above the bound", waste],
      ["capacity", plan.capacity_nbytes === null ? "–" : bytes(plan.capacity_nbytes)],
    ];
    if (plan.thinned) rows.push(["drawn", plan.thinned]);
    const parts: Node[] = [table("Address plan", ["", ""], rows)];
    if (selected) {
      parts.push(
        table("Buffer", ["", ""], [
          ["name", printable(selected.name)],
          ["bytes", bytes(selected.nbytes)],
          ["address", `${count(selected.offset)} to ${count(selected.offset + selected.nbytes)}`],
          ["lives", `${count(selected.start)} to ${count(selected.end)}`],
        ]),
      );
    } else {
      parts.push(h("p", {}, "Click a rectangle to see its buffer; wheel and drag zoom and move."));
    }
    this.facts.replaceChildren(...parts);
  }
}

export function showPacking(root: HTMLElement, plans: Packing[]): void {
  const title = h("div", { class: "bar" }, h("div", { class: "title" }, h("h1", {}, "memo pack")));
  const shown = plans.length ? new PackingView(plans).element : h("p", {}, "nothing to place");
  root.append(h("header", {}, title), shown);
}

function binaryStep(rough: number): number {
  return 2 ** Math.ceil(Math.log2(Math.max(rough, 1)));
}
