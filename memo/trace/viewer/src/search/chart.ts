// The space: a point for each layout, by its step and its memory; below, those that were never planned, at their bound.

import { scaleLinear } from "d3-scale";
import { h } from "../dom";
import { bytes } from "../format";
import { entryFigures, pointFigures, seconds, shapeWords, type Answer, type Entry, type Point, type Shape } from "./answer";
import { onWidth, swatch, Tip, v } from "./figure";

const TOP = 62; // pixels for words and the numbers of the best
const LEFT = 104;
const NARROW_LEFT = 62;
const RIGHT = 12;
const BEYOND = 84; // of the column of those that are far slower
const FAR = 1.1; // times the slowest that was planned, from which steps have that column
const HEIGHT = 250;
const ROW = 26; // of a bound
const AXIS = 40;
const NEAR = 18; // pixels
const LEAST_SHOWN = 0.12; // of the highest memory; smaller differences look small
const ROWS = 3; // of numbers of the best

// Colours by what divides a stage's ranks, Okabe and Ito's; layouts with a pipeline are squares.
const COLOURS: Record<string, string> = {
  "": "#8a8f98",
  dp: "#0072b2",
  cp: "#e69f00",
  tp: "#d55e00",
  "dp+cp": "#009e73",
  "dp+tp": "#cc79a7",
  "cp+tp": "#8c7bd0",
  "dp+cp+tp": "#56b4e9",
};

interface Mark {
  x: number;
  y: number;
  of: Shape;
  number: number; // among the best, or -1
  figures: [string, string][];
}

function colour(shape: Shape): string {
  return COLOURS[(["dp", "cp", "tp"] as const).filter((name) => shape[name] > 1).join("+")];
}

export class Chart {
  readonly element: HTMLElement;
  private readonly place = h("div");
  private readonly tip = new Tip();
  private readonly details = h("dl", { class: "figures", id: "point", "aria-live": "polite" });
  private readonly families: string[];
  private family: string | null = null;
  private marks: Mark[] = [];
  private chosen = 0;
  private width = 0;

  constructor(private readonly answer: Answer, private readonly entries: Entry[], private readonly choose: (number: number) => void) {
    this.families = [...new Set(answer.points.map((point) => point.family))].sort();
    const figure = h("figure", {}, this.place, this.tip.element);
    const misfits = answer.points.filter((point) => point.status === "does not fit");
    const both = h("div", { class: "space" }, figure, this.details);
    this.element = h("div", {}, this.legend(), both, misfits.length ? this.list(misfits) : null);
    onWidth(this.place, (width) => {
      this.width = width;
      this.draw();
    });
    figure.addEventListener("pointermove", (event) => this.hover(event));
    figure.addEventListener("pointerleave", () => this.tip.hide());
    figure.addEventListener("click", (event) => {
      const mark = this.nearest(event);
      if (!mark) return;
      this.tell(mark.figures);
      if (mark.number >= 0) this.choose(mark.number);
    });
  }

  select(number: number): void {
    this.chosen = number;
    this.tell(entryFigures(this.entries[number]));
    this.draw();
  }

  private legend(): HTMLElement {
    const keys = this.families.map((family) => {
      const of = this.answer.points.find((point) => point.family === family)!;
      const sample = swatch(colour(of));
      sample.style.borderRadius = of.pp > 1 ? "0" : "50%";
      const key = h("button", { class: "key", type: "button", "aria-pressed": "false" }, sample, family);
      key.addEventListener("click", () => {
        this.family = this.family === family ? null : family;
        for (const other of keys) other.setAttribute("aria-pressed", String(other === key && this.family !== null));
        this.draw();
      });
      return key;
    });
    return h("div", { class: "legend" }, ...keys);
  }

  private list(points: Point[]): HTMLElement {
    const words = `${points.length} ${points.length > 1 ? "layouts do" : "layout does"} not fit`;
    return h("details", { id: "misfits" }, h("summary", {}, words), h("p", { class: "note" }, points.map(shapeWords).join("; ")));
  }

  private tell(figures: [string, string][]): void {
    this.details.replaceChildren(...figures.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  private draw(): void {
    if (!this.width) return;
    const { points } = this.answer;
    const planned = points.filter((point) => point.status === "planned");
    const slower = points.filter((point) => point.status === "slower");
    const bounds = Object.keys(this.answer.proof.pruned).filter((bound) => slower.some((point) => point.bound === bound));
    const left = this.width < 600 ? NARROW_LEFT : LEFT;
    const times = [...this.entries.map((one) => one.step_s), ...planned.map((one) => one.step_s!)];
    const limit = Math.max(...times) * FAR;
    const later = slower.filter((one) => one.bound_s! > limit).sort((a, b) => a.bound_s! - b.bound_s!);
    times.push(...slower.map((one) => one.bound_s!).filter((time) => time <= limit));
    const [least, most] = [Math.min(...times), Math.max(...times)];
    const room = (most - least || least) * 0.04;
    const right = this.width - RIGHT;
    const end = later.length ? right - BEYOND : right;
    const scale = scaleLinear().domain([least - room, most + room]).range([left, end]);
    const x = (time: number): number => {
      if (time <= limit) return scale(time);
      const place = later.findIndex((one) => one.bound_s === time);
      return end + 14 + ((BEYOND - 20) * place) / Math.max(later.length - 1, 1);
    };
    const budget = this.answer.budgets.device_bytes;
    const peaks = [...this.entries.map((one) => one.memory.peak_bytes), ...planned.map((one) => one.peak_device_bytes!)];
    const [lowest, highest] = [Math.min(...peaks), Math.max(budget, ...peaks)];
    const shown = Math.max((highest - lowest) * 1.1, highest * LEAST_SHOWN);
    const y = scaleLinear().domain([Math.max(0, highest - shown), highest + shown * 0.05]).range([TOP + HEIGHT, TOP]);
    const bottom = TOP + HEIGHT + bounds.length * ROW;
    const svg = v("svg", { width: this.width, height: bottom + AXIS, role: "img", "aria-label": "Step time against memory of a GPU" });

    for (const tick of scale.ticks(Math.max(2, Math.floor((end - left) / 90)))) {
      svg.append(v("line", { class: "axis", x1: scale(tick), x2: scale(tick), y1: TOP, y2: bottom }));
      svg.append(v("text", { x: scale(tick), y: bottom + 16, "text-anchor": "middle" }, seconds(tick)));
    }
    if (later.length) {
      svg.append(v("line", { class: "leader", x1: end, x2: end, y1: TOP, y2: bottom }));
      const words = `${seconds(later[0].bound_s!)} to ${seconds(later.at(-1)!.bound_s!)}`;
      svg.append(v("text", { x: right, y: TOP + HEIGHT - 6, "text-anchor": "end" }, later.length > 1 ? words : seconds(later[0].bound_s!)));
    }
    const unit = 2 ** (10 * Math.floor((Math.log2(Math.max(budget, 8)) - 3) / 10));
    for (const tick of scaleLinear().domain(y.domain().map((nbytes) => nbytes / unit)).ticks(5)) {
      svg.append(v("line", { class: "axis", x1: left, x2: end, y1: y(tick * unit), y2: y(tick * unit) }));
      svg.append(v("text", { x: left - 6, y: y(tick * unit) + 4, "text-anchor": "end" }, tick ? bytes(tick * unit) : "0"));
    }
    svg.append(v("text", { x: end, y: bottom + 34, "text-anchor": "end" }, "time of a step"));
    svg.append(v("text", { x: 0, y: 10 }, "memory of the fullest GPU"));
    svg.append(v("line", { class: "limit", x1: left, x2: end, y1: y(budget), y2: y(budget) }));
    svg.append(v("text", { x: end - 4, y: y(budget) + 14, "text-anchor": "end" }, `budget ${bytes(budget)}`));
    bounds.forEach((bound, row) => {
      const middle = TOP + HEIGHT + (row + 0.5) * ROW;
      svg.append(v("line", { class: "axis", x1: left, x2: right, y1: middle + ROW / 2, y2: middle + ROW / 2 }));
      const short = left < LEFT && bound.length > 9 ? `${bound.slice(0, 4)}.` : bound;
      svg.append(v("text", { x: left - 6, y: middle + 4, "text-anchor": "end" }, `${short} ≥`));
    });

    this.marks = [];
    for (const point of slower) {
      const at = { x: x(point.bound_s!), y: TOP + HEIGHT + (bounds.indexOf(point.bound!) + 0.5) * ROW };
      this.add(svg, point, at, { class: "slower", fill: "none", stroke: colour(point), "data-s": point.bound_s!, "data-bound": point.bound! });
    }
    for (const point of planned) {
      const at = { x: x(point.step_s!), y: y(point.peak_device_bytes!) };
      this.add(svg, point, at, { class: "planned", fill: colour(point), "data-s": point.step_s!, "data-bytes": point.peak_device_bytes! });
    }
    const taken: { x: number; row: number }[] = [];
    this.entries.forEach((entry, number) => {
      const at = { x: x(entry.step_s), y: y(entry.memory.peak_bytes) };
      const given = { class: "best", fill: colour(entry), "data-s": entry.step_s, "data-bytes": entry.memory.peak_bytes };
      this.add(svg, entry, at, given, number);
      let row = 0;
      while (taken.some((other) => other.row === row && Math.abs(other.x - at.x) < (number > 8 ? 20 : 14))) row++;
      taken.push({ x: at.x, row });
      if (row >= ROWS) return; // the others are in the table
      const label = TOP - 6 - 14 * row;
      svg.append(v("line", { class: "leader", x1: at.x, x2: at.x, y1: label + 3, y2: at.y - 6 }));
      svg.append(v("text", { class: "number", x: at.x, y: label }, String(number + 1)));
    });
    const { step_s: time, memory } = this.entries[this.chosen];
    svg.append(v("circle", { class: "chosen", cx: x(time), cy: y(memory.peak_bytes), r: 9 }));
    this.place.replaceChildren(svg);
  }

  private add(svg: SVGElement, of: Shape, at: { x: number; y: number }, given: Record<string, string | number>, number = -1): void {
    const size = number >= 0 ? 5 : 4;
    const faded = this.family !== null && of.family !== this.family;
    const attributes = { ...given, class: `${given["class"]}${faded ? " faded" : ""}`, "data-family": of.family };
    const box = { x: at.x - size, y: at.y - size, width: 2 * size, height: 2 * size };
    svg.append(of.pp > 1 ? v("rect", { ...attributes, ...box }) : v("circle", { ...attributes, cx: at.x, cy: at.y, r: size }));
    if (faded) return;
    const figures = number >= 0 ? entryFigures(this.entries[number]) : pointFigures(of as Point);
    this.marks.push({ ...at, of, number, figures });
  }

  private nearest(event: PointerEvent | MouseEvent): Mark | null {
    const box = this.place.getBoundingClientRect();
    let [found, least]: [Mark | null, number] = [null, NEAR];
    const best = this.marks.filter((mark) => mark.number >= 0);
    for (const mark of [...best, ...this.marks]) {
      const far = Math.hypot(event.clientX - box.left - mark.x, event.clientY - box.top - mark.y);
      if (far < least) [found, least] = [mark, far]; // of equal ones the first among the best
    }
    return found;
  }

  private hover(event: PointerEvent): void {
    const mark = this.nearest(event);
    if (!mark) return this.tip.hide();
    const number = mark.number >= 0 ? [`number ${mark.number + 1}`] : [];
    this.tip.show([...number, ...mark.figures.map(([name, value]) => `${name}: ${value}`)].join("\n"), mark.x, mark.y);
  }
}
