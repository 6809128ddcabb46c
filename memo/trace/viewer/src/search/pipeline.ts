// One simulated step: a lane for each stage, with passes as blocks of what their time is spent on.

import { TimeAxis } from "../axis";
import { h, table, type Cell } from "../dom";
import { instant } from "../format";
import { inkOn, laneColour, theme } from "../theme";
import { seconds, type Drawing, type Stage } from "./answer";
import { legend, onWidth, Tip } from "./figure";
import { named } from "./memory";

const GUTTER = 62;
const TOP = 22;
const LANE = 26;
const LEAST_LANE = 9;
const MOST_HEIGHT = 560;
const UNITS = 1e6; // of a step
const CHARACTER = 6.5; // pixels

const [INPUT, WEIGHT] = ["#f2cc7a", "#b07d12"]; // of a split backward
const NAMES: Record<string, string> = { F: "forward", B: "backward", I: "backward, inputs' half", W: "backward, weights' half", O: "optimizer" };

function colours(): Record<string, string> {
  return {
    F: laneColour("compute", "forward"),
    B: laneColour("compute", "backward"),
    I: INPUT,
    W: WEIGHT,
    O: laneColour("compute", "optimizer"),
    recompute: laneColour("recompute", ""),
    stall: theme().stall,
    communication: "#009e73",
  };
}

const PARTS = ["recompute", "stall", "communication"] as const;
const WAITS = { recompute: "recompute", stall: "waits for copies", communication: "waits for collectives" };

export class Steps {
  readonly element = h("div");
  private readonly canvas = h("canvas", { class: "plot", role: "img", "aria-label": "Timeline of the stages of one step" });
  private readonly tip = new Tip();
  private readonly figure = h("figure", {}, h("div", { class: "steps" }, this.canvas), this.tip.element);
  private readonly rest = h("div", { class: "wide", id: "stages" });
  private readonly note = h("p", { class: "note" });
  private readonly keys = h("div");
  private readonly buttons = h("div", { class: "zoom" });
  private axis: TimeAxis | null = null;
  private drawing!: Drawing;
  private width = 0;

  constructor() {
    const act: [string, string, () => void][] = [
      ["+", "closer", () => this.axis?.zoomBy(1.6, null)],
      ["−", "farther", () => this.axis?.zoomBy(1 / 1.6, null)],
      ["whole step", "whole step", () => this.axis?.show(0, this.drawing.simulated_step_s * 1e9)],
    ];
    for (const [text, label, run] of act) {
      const button = h("button", { type: "button", "aria-label": label }, text);
      button.addEventListener("click", run);
      this.buttons.append(button);
    }
    this.element.append(this.keys, this.note, this.buttons, this.figure, this.rest);
    onWidth(this.figure, (width) => {
      this.width = width;
      this.layout();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    // The wheel scrolls the page, as everywhere else on it; with Ctrl it zooms.
    this.figure.addEventListener("wheel", (event) => event.ctrlKey || event.stopImmediatePropagation(), { capture: true });
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.tip.hide());
  }

  show(drawing: Drawing, microbatches: number): void {
    this.drawing = drawing;
    const there = drawing.stages.every((stage) => stage.spans);
    for (const part of [this.figure, this.buttons, this.keys]) part.hidden = !there;
    const first = drawing.microbatches < microbatches ? `The first ${drawing.microbatches} of ${microbatches} microbatches. ` : "";
    this.note.textContent = there
      ? first + "From the simulator. A block is a pass of one microbatch, with its number; blank is waiting for other stages. Drag moves, Ctrl and the wheel zoom."
      : "The page has no room for this timeline; write the plan (-o) and look at it with memo simulate and memo trace html.";
    this.rest.replaceChildren(this.table());
    if (!there) return;
    const has = new Set(drawing.stages.flatMap((stage) => stage.turns!.map((turn) => turn[0])));
    const colour = colours();
    const keys: [string, string][] = [...has].map((letter) => [NAMES[letter] ?? letter, colour[letter]]);
    for (const part of PARTS) if (drawing.stages.some((stage) => stage.seconds[part] > 0)) keys.push([WAITS[part], colour[part]]);
    this.keys.replaceChildren(legend(keys));
    this.layout(true);
  }

  private table(): HTMLElement {
    const names = ["forward", "backward", "recompute", "stall", "communication", "idle", "optimizer"];
    const rows = this.drawing.stages.map((stage, number): Cell[] => [
      named(number, stage.layers, this.drawing.stages.length),
      ...names.map((name): Cell => [seconds(stage.seconds[name]), stage.seconds[name]]),
    ]);
    const found = table("seconds of a step on each stage; idle: waiting for other stages", ["", ...names], rows);
    return rows.length > 8 ? h("details", {}, h("summary", {}, "in numbers"), found) : found;
  }

  private get lane(): number {
    return Math.max(LEAST_LANE, Math.min(LANE, Math.floor((MOST_HEIGHT - TOP) / this.drawing.stages.length)));
  }

  private layout(fresh = false): void {
    if (!this.width || !this.drawing?.stages[0].spans) return;
    const height = TOP + this.lane * this.drawing.stages.length + 4;
    const density = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * density);
    this.canvas.height = Math.round(height * density);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.getContext("2d")!.setTransform(density, 0, 0, density, 0, 0);
    if (fresh || !this.axis) this.axis = new TimeAxis(this.canvas, 0, this.drawing.simulated_step_s * 1e9, () => this.draw());
    this.axis.resize(GUTTER, this.width - 4, height);
    if (fresh) this.axis.show(0, this.drawing.simulated_step_s * 1e9);
    this.canvas.style.touchAction = "pan-y";
    this.draw();
  }

  private draw(): void {
    if (!this.axis) return;
    const { drawing, lane, width } = this;
    const context = this.canvas.getContext("2d")!;
    const look = theme();
    const colour = colours();
    const unit = (drawing.simulated_step_s * 1e9) / UNITS;
    const [from, to] = this.axis.domain;
    context.fillStyle = look.background;
    context.fillRect(0, 0, width, TOP + lane * drawing.stages.length + 4);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const tick of this.axis.scale.ticks(Math.max(2, Math.floor(width / 120)))) {
      const x = this.axis.scale(tick);
      context.fillStyle = look.grid;
      context.fillRect(x, TOP - 6, 1, lane * drawing.stages.length + 8);
      context.fillStyle = look.faint;
      context.textAlign = x > width - 40 ? "right" : "center";
      context.fillText(instant(tick, to - from), Math.min(x, width - 4), 8);
    }
    drawing.stages.forEach((stage, number) => {
      const y = TOP + number * lane;
      context.fillStyle = look.faint;
      context.textAlign = "left";
      const every = Math.ceil(14 / lane);
      if (number % every === 0) context.fillText(drawing.stages.length > 1 ? `stage ${number}` : "GPU", 2, y + lane / 2, GUTTER - 6);
      context.fillStyle = look.band;
      context.fillRect(GUTTER, y + 1, width - 4 - GUTTER, lane - 2);
      context.save();
      context.beginPath();
      context.rect(GUTTER, y, width - 4 - GUTTER, lane);
      context.clip();
      this.drawPasses(context, stage, y, lane, colour, unit);
      context.restore();
    });
    Object.assign(this.canvas.dataset, { from: String(from), to: String(to) });
  }

  // Each pass as a block, in it what is not its work, and the number of its microbatch where there is room.
  private drawPasses(context: CanvasRenderingContext2D, stage: Stage, y: number, lane: number, colour: Record<string, string>, unit: number): void {
    const spans = stage.spans!;
    const at = (time: number): number => this.axis!.scale(time * unit);
    const height = lane - 2;
    for (let i = 0, next = 0; i < spans.length; i = next) {
      while (next < spans.length && spans[next][2] === spans[i][2]) next++;
      const [x, end] = [at(spans[i][0]), at(spans[next - 1][1])];
      if (end < GUTTER || x > this.width) continue;
      const turn = stage.turns![spans[i][2]] ?? "O";
      context.fillStyle = colour[turn[0]];
      context.fillRect(x, y + 1, end - x, height);
      for (const span of spans.slice(i, next)) {
        let top = y + 1;
        PARTS.forEach((part, place) => {
          const share = ((span[3 + place] ?? 0) / 1000) * height;
          context.fillStyle = colour[part];
          if (share) context.fillRect(at(span[0]), top, at(span[1]) - at(span[0]), share);
          top += share;
        });
      }
      if (end - x > 3) {
        context.fillStyle = theme().background;
        context.fillRect(x, y + 1, 0.75, height);
      }
      const text = turn.slice(1).split(".")[0];
      if (text && lane >= 12 && end - x > text.length * CHARACTER + 6) {
        context.fillStyle = inkOn(colour[turn[0]]);
        context.textAlign = "center";
        context.fillText(text, (Math.max(x, GUTTER) + Math.min(end, this.width)) / 2, y + lane / 2 + 1);
      }
    }
  }

  private hover(event: PointerEvent): void {
    const box = this.canvas.getBoundingClientRect();
    const number = Math.floor((event.clientY - box.top - TOP) / this.lane);
    const stage = this.drawing.stages[number];
    const unit = (this.drawing.simulated_step_s * 1e9) / UNITS;
    const t = (this.axis?.scale.invert(event.clientX - box.left) ?? 0) / unit;
    if (!stage?.spans || event.clientX - box.left < GUTTER) return this.tip.hide();
    const span = stage.spans.find((one) => one[0] <= t && t < one[1]);
    const at = this.figure.getBoundingClientRect();
    const lines = span ? this.describe(stage, span) : ["idle"];
    this.tip.show([`stage ${number}`, ...lines].join("\n"), event.clientX - at.left, event.clientY - at.top);
  }

  private describe(stage: Stage, span: number[]): string[] {
    const step = this.drawing.simulated_step_s;
    const turn = stage.turns![span[2]] ?? "O";
    const [microbatch, chunk] = turn.slice(1).split(".");
    const of = (microbatch ? `, microbatch ${microbatch}` : "") + (chunk ? `, chunk ${chunk}` : "");
    const took = ((span[1] - span[0]) / UNITS) * step;
    const parts = PARTS.flatMap((part, i) => (span[3 + i] ? [`${WAITS[part]}: ${seconds((took * span[3 + i]) / 1000)}`] : []));
    const own = stage.spans!.filter((one) => one[2] === span[2]);
    const whole = ((own.at(-1)![1] - own[0][0]) / UNITS) * step;
    return [`${NAMES[turn[0]] ?? ""}${of}, ${seconds(whole)}`, ...(parts.length ? [`of ${seconds(took)} here, ${parts.join(", ")}`] : [])];
  }
}
