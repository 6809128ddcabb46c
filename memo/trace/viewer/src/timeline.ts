// The first view: lanes of every shown rank and the memory of each tier above one time axis, on one canvas.

import { linkHorizontal } from "d3-shape";
import { TimeAxis } from "./axis";
import type { Page, Row } from "./data";
import { h } from "./dom";
import { bytes, duration, instant, printable, rate } from "./format";
import { drawRow, drawStalls, firstVisible, labelOf, type Pen } from "./lanes";
import { MemoryChart } from "./memory";
import type { Selection, Store } from "./state";
import { theme } from "./theme";

const GUTTER = 96; // pixels for lane names
const AXIS = 24;
const FONT = "11px system-ui, sans-serif";
const MAX_ROWS = 4; // of one lane; what overlaps deeper shares the last
const NEAR = 3; // pixels

interface Band {
  kind: "title" | "rows" | "stalls" | "memory";
  rank: number;
  y: number;
  height: number;
  text: string;
  rows: Row[];
  chart: MemoryChart | null;
}

interface Hit {
  band: Band;
  row: Row | null;
  index: number;
}

export class Timeline {
  readonly element: HTMLElement;
  readonly canvas: HTMLCanvasElement;
  readonly axis: TimeAxis;
  pointer: number | null = null; // x of the mouse above the canvas
  private readonly context: CanvasRenderingContext2D;
  private readonly spacer: HTMLElement;
  private readonly tip: HTMLElement;
  private readonly charts: MemoryChart[][];
  private bands: Band[] = [];
  private width = 1;
  private height = 1;
  private asked = false;
  private pattern: CanvasPattern | string = "";

  constructor(private readonly page: Page, private readonly store: Store) {
    this.canvas = h("canvas", { class: "plot", role: "img", tabindex: "0", "aria-label": "Timeline of lanes and memory" });
    this.tip = h("div", { class: "tip", role: "tooltip", hidden: "" });
    this.spacer = h("div", { class: "spacer" });
    this.element = h("div", { class: "timeline" }, h("div", { class: "stage" }, this.canvas, this.spacer), this.tip);
    const context = this.canvas.getContext("2d", { alpha: false });
    if (!context) throw new Error("no canvas");
    this.context = context;
    this.charts = page.ranks.map((rank) =>
      rank.tiers.map((series, i) => new MemoryChart(page.raw.tiers[i], series)).filter((chart) => !chart.series.empty),
    );
    this.axis = new TimeAxis(this.canvas, page.begin, page.end, () => this.redraw());
    this.listen();
  }

  // Draws before the next frame, however often it is asked.
  redraw(): void {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  // The window, the theme or the shown ranks changed.
  layout(): void {
    const box = this.element.getBoundingClientRect();
    if (box.width < 1 || box.height < 1) return;
    const density = window.devicePixelRatio || 1;
    [this.width, this.height] = [Math.floor(box.width), Math.floor(box.height)];
    this.canvas.width = Math.round(this.width * density);
    this.canvas.height = Math.round(this.height * density);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(density, 0, 0, density, 0, 0);
    this.pattern = this.hatch();
    this.bands = this.stack();
    const last = this.bands.at(-1);
    this.spacer.style.height = `${Math.max(0, (last ? last.y + last.height : 0) + 6 - this.height)}px`;
    this.axis.resize(GUTTER, this.width - 8, this.height);
    this.redraw();
  }

  private stack(): Band[] {
    const { allRanks, rank } = this.store.now;
    const shown = allRanks ? this.page.ranks.map((_, i) => i) : [rank];
    const bands: Band[] = [];
    let y = AXIS + 4;
    const add = (band: Omit<Band, "y">): void => {
      bands.push({ ...band, y });
      y += band.height + 3;
    };
    for (const index of shown) {
      const base = { rank: index, rows: [], chart: null };
      if (allRanks) add({ ...base, kind: "title", height: 14, text: `rank ${this.page.ranks[index].rank}` });
      for (const band of this.lanesOf(index, allRanks ? 13 : 18)) add(band);
    }
    const charts = this.charts[rank];
    const room = Math.max(84, Math.min(240, (this.height - y - 10) / Math.max(charts.length, 1) - 6));
    for (const chart of charts) {
      y += 3;
      add({ kind: "memory", rank, height: room, text: chart.tier, rows: [], chart });
    }
    return bands;
  }

  private lanesOf(index: number, height: number): Omit<Band, "y">[] {
    const rank = this.page.ranks[index];
    const bands: Omit<Band, "y">[] = [];
    this.page.raw.lanes.forEach((lane, place) => {
      const rows = rank.rows.filter((row) => row.lane === place);
      const base = { rank: index, chart: null };
      if (rows.length) {
        const deep = Math.min(rows.length, MAX_ROWS);
        const tall = (lane === "compute" ? height + 6 : height) + (deep - 1) * 7;
        bands.push({ ...base, kind: "rows", height: tall, text: lane, rows });
      }
      if (lane === "compute" && rank.stalls.length) {
        bands.push({ ...base, kind: "stalls", height: Math.max(12, height - 4), text: "stalls", rows: [] });
      }
    });
    return bands;
  }

  private pen(rank: number): Pen {
    return {
      context: this.context,
      scale: this.axis.scale,
      left: GUTTER,
      right: this.width - 8,
      page: this.page,
      rank: this.page.ranks[rank],
      looking: this.store.now,
      theme: theme(),
    };
  }

  private draw(): void {
    const { context } = this;
    const colours = theme();
    const scroll = this.element.scrollTop;
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = colours.background;
    context.fillRect(0, 0, this.width, this.height);
    this.drawGrid();
    for (const band of this.bands) {
      const y = band.y - scroll;
      if (y + band.height < AXIS || y > this.height) continue;
      this.drawBand(band, y);
    }
    this.drawSelection(scroll);
    this.drawAxis();
    const [from, to] = this.axis.domain;
    this.canvas.dataset["from"] = String(from);
    this.canvas.dataset["to"] = String(to);
  }

  private drawBand(band: Band, y: number): void {
    const { context } = this;
    const pen = this.pen(band.rank);
    context.fillStyle = band.kind === "title" ? pen.theme.text : pen.theme.faint;
    const middle = band.kind === "memory" ? y + 7 : y + band.height / 2;
    context.fillText(band.kind === "memory" ? `${band.text} memory` : band.text, 8, middle, GUTTER - 12);
    if (band.kind === "rows") {
      context.fillStyle = pen.theme.band;
      context.fillRect(pen.left, y, pen.right - pen.left, band.height);
      band.rows.forEach((row, i) => drawRow(pen, row, ...this.slot(band, i, y)));
    } else if (band.kind === "stalls") {
      drawStalls(pen, y, band.height, this.pattern);
    } else if (band.chart) {
      const peak = pen.rank.step(this.store.now.step).peaks.find((one) => one.tier === band.text);
      if (peak) band.chart.draw(pen, peak, y, band.height);
    }
  }

  // Where the i-th row of a lane stands: (y, height).
  private slot(band: Band, i: number, y: number): [number, number] {
    const deep = Math.min(band.rows.length, MAX_ROWS);
    const tall = band.height / deep;
    return [y + Math.min(i, deep - 1) * tall, Math.max(2, tall - (deep > 1 ? 1 : 0))];
  }

  private drawGrid(): void {
    const { context } = this;
    const colours = theme();
    context.fillStyle = colours.grid;
    for (const tick of this.ticks()) {
      context.fillRect(Math.round(this.axis.scale(tick)), AXIS, 1, this.height);
    }
  }

  private drawAxis(): void {
    const { context } = this;
    const colours = theme();
    const { scale } = this.axis;
    const [from, to] = this.axis.domain;
    context.fillStyle = colours.background;
    context.fillRect(0, 0, this.width, AXIS);
    context.font = FONT;
    context.fillStyle = colours.faint;
    context.textAlign = "center";
    for (const tick of this.ticks()) {
      const x = scale(tick);
      if (x > GUTTER + 20 && x < this.width - 30) context.fillText(instant(tick - this.page.begin, to - from), x, 16);
    }
    context.textAlign = "left";
    context.fillText(duration(to - from), 8, 16);
    for (const step of this.page.ranks[this.store.now.rank].figures.steps) {
      const [begin] = this.page.ranks[this.store.now.rank].interval(step.step);
      if (begin < from || begin > to) continue;
      const x = Math.round(scale(begin));
      context.fillStyle = colours.faint;
      context.fillRect(x, 2, 1, this.height);
      const text = `step ${step.step}`;
      if (x + 4 + context.measureText(text).width < this.width) context.fillText(text, x + 4, 6);
    }
    context.fillStyle = colours.grid;
    context.fillRect(0, AXIS - 1, this.width, 1);
  }

  // Round times since the trace began, on the common axis.
  private ticks(): number[] {
    const { begin } = this.page;
    const [from, to] = this.axis.domain;
    const since = this.axis.scale.copy().domain([from - begin, to - begin]);
    return since.ticks(Math.max(2, Math.floor((this.width - GUTTER) / 110))).map((tick) => tick + begin);
  }

  // The chosen span or stall framed, and a tensor's way as arrows from copy to copy.
  private drawSelection(scroll: number): void {
    const { selection } = this.store.now;
    if (!selection) return;
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(GUTTER - 1, AXIS, this.width - GUTTER, this.height);
    context.clip();
    this.drawChosen(selection, scroll);
    context.restore();
  }

  private drawChosen(selection: Selection, scroll: number): void {
    const rank = this.page.ranks[selection.rank];
    if (selection.kind === "span") this.frame(selection.rank, rank.rows[selection.row], selection.index, scroll);
    if (selection.kind === "stall") {
      const band = this.bands.find((one) => one.kind === "stalls" && one.rank === selection.rank);
      const { t, d } = rank.stalls;
      if (band) this.outline(t[selection.index], t[selection.index] + d[selection.index], band.y - scroll, band.height);
    }
    if (selection.life >= 0) this.drawWay(selection.rank, selection.life, scroll);
  }

  private drawWay(rankIndex: number, life: number, scroll: number): void {
    const { context } = this;
    const colours = theme();
    const rank = this.page.ranks[rankIndex];
    const copies = rank.copiesOf(life);
    for (const [row, i] of copies) this.frame(rankIndex, row, i, scroll);
    const places = copies.map(([row, i]) => ({ t: row.t[i], end: row.end[i], y: this.middleOf(rankIndex, row, scroll) }));
    context.strokeStyle = colours.accent;
    context.fillStyle = colours.accent;
    context.lineWidth = 1.75;
    for (const [i, target] of places.entries()) {
      const source = places[i - 1];
      if (!source || source.y === null || target.y === null) continue;
      const from: [number, number] = [this.axis.scale(source.end), source.y];
      const to: [number, number] = [this.axis.scale(Math.max(target.t, source.end)), target.y];
      context.beginPath();
      linkHorizontal().context(context)({ source: from, target: to });
      context.stroke();
      context.beginPath();
      context.moveTo(to[0] + 2, to[1]);
      context.lineTo(to[0] - 6, to[1] - 4);
      context.lineTo(to[0] - 6, to[1] + 4);
      context.fill();
    }
    context.lineWidth = 1;
    const compute = this.bands.find((band) => band.rank === rankIndex && band.kind === "rows" && band.text === "compute");
    if (!compute) return;
    const { lives } = rank;
    const points = [lives.start[life], ...lives.useT.subarray(lives.useAt[life], lives.useAt[life + 1])];
    for (const t of points) this.pin(this.axis.scale(t), compute.y - scroll);
  }

  // A small triangle above the compute lane: where a tensor was saved and where it was used.
  private pin(x: number, y: number): void {
    if (x < GUTTER || x > this.width - 8) return;
    const { context } = this;
    context.beginPath();
    context.moveTo(x, y + 7);
    context.lineTo(x - 4, y - 1);
    context.lineTo(x + 4, y - 1);
    context.fill();
  }

  private middleOf(rankIndex: number, row: Row, scroll: number): number | null {
    const band = this.bands.find((one) => one.rank === rankIndex && one.rows.includes(row));
    if (!band) return null;
    const [y, height] = this.slot(band, band.rows.indexOf(row), band.y - scroll);
    return y + height / 2;
  }

  private frame(rankIndex: number, row: Row, i: number, scroll: number): void {
    const band = this.bands.find((one) => one.rank === rankIndex && one.rows.includes(row));
    if (!band) return;
    const [y, height] = this.slot(band, band.rows.indexOf(row), band.y - scroll);
    this.outline(row.t[i], row.end[i], y, height);
  }

  private outline(from: number, to: number, y: number, height: number): void {
    if (this.axis.scale(to) < GUTTER || this.axis.scale(from) > this.width - 8) return;
    const x0 = Math.max(GUTTER, this.axis.scale(from));
    const x1 = Math.min(this.width - 8, Math.max(this.axis.scale(to), x0 + 3));
    this.context.strokeStyle = theme().accent;
    this.context.lineWidth = 2;
    this.context.strokeRect(x0, y, x1 - x0, height);
    this.context.lineWidth = 1;
  }

  private listen(): void {
    this.element.addEventListener("scroll", () => this.redraw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.tip.hidden = true;
    });
    this.canvas.addEventListener("click", (event) => this.choose(event));
    this.canvas.addEventListener("dblclick", (event) => this.approach(event));
    new ResizeObserver(() => this.layout()).observe(this.element);
    this.store.watch((change) => {
      if ("allRanks" in change || "rank" in change) this.layout();
      else this.redraw();
    });
  }

  private at(event: MouseEvent): { x: number; y: number; hit: Hit | null } {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const below = y + this.element.scrollTop;
    const band = this.bands.find((one) => below >= one.y && below <= one.y + one.height);
    return { x, y, hit: band && y > AXIS && x >= GUTTER ? this.hit(band, x, below) : null };
  }

  private hit(band: Band, x: number, y: number): Hit {
    const miss = { band, row: null, index: -1 };
    const near = (this.axis.domain[1] - this.axis.domain[0]) / (this.width - GUTTER) * NEAR;
    const t = this.axis.scale.invert(x);
    if (band.kind === "stalls") {
      const { stalls } = this.page.ranks[band.rank];
      let best = -1;
      for (let i = 0; i < stalls.length && stalls.t[i] <= t + near; i++) {
        if (stalls.t[i] + stalls.d[i] >= t - near && (best < 0 || stalls.d[i] > stalls.d[best])) best = i;
      }
      return { ...miss, index: best };
    }
    for (const [i, row] of band.rows.entries()) {
      const [top, height] = this.slot(band, i, band.y);
      if (y < top || y > top + height) continue;
      const index = closest(row, t, near);
      if (index >= 0) return { band, row, index };
    }
    return miss;
  }

  private choose(event: MouseEvent): void {
    const { hit } = this.at(event);
    if (!hit || hit.index < 0) {
      this.store.set({ selection: null });
      return;
    }
    const rank = this.page.ranks[hit.band.rank];
    const base = { rank: hit.band.rank, index: hit.index };
    if (!hit.row) {
      this.store.set({ selection: { ...base, kind: "stall", life: rank.stalls.life[hit.index], row: -1 } });
      return;
    }
    this.store.set({ selection: { ...base, kind: "span", life: hit.row.life[hit.index], row: rank.rows.indexOf(hit.row) } });
  }

  private approach(event: MouseEvent): void {
    const { hit } = this.at(event);
    if (hit?.row && hit.index >= 0) this.axis.around(hit.row.t[hit.index], hit.row.end[hit.index], 1);
  }

  private hover(event: MouseEvent): void {
    const { x, y, hit } = this.at(event);
    this.pointer = x;
    const lines = hit ? this.describe(hit, x, y) : [];
    this.tip.hidden = !lines.length;
    if (!lines.length) return;
    this.tip.replaceChildren(...lines.map((text) => h("div", {}, text)));
    const left = Math.min(x + 14, this.width - this.tip.offsetWidth - 6);
    const top = y + 16 + this.tip.offsetHeight > this.height ? y - this.tip.offsetHeight - 8 : y + 16;
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${Math.max(0, top + this.element.scrollTop)}px)`;
  }

  private describe(hit: Hit, x: number, y: number): string[] {
    const rank = this.page.ranks[hit.band.rank];
    if (hit.band.kind === "memory") return this.describeMemory(hit.band, x, y + this.element.scrollTop);
    if (hit.index < 0) return [];
    if (!hit.row) {
      const { stalls } = rank;
      const cause = this.page.raw.causes[stalls.cause[hit.index]];
      return [`${cause} stall, ${duration(stalls.d[hit.index])}`, printable(this.page.name(stalls.name[hit.index]))];
    }
    const took = hit.row.end[hit.index] - hit.row.t[hit.index];
    const nbytes = hit.row.nbytes[hit.index];
    const phase = this.page.raw.phases[hit.row.phase[hit.index]];
    const moved = nbytes ? `, ${bytes(nbytes)} at ${rate(took ? (nbytes / took) * 1e9 : null)}` : "";
    return [labelOf(this.page, rank, hit.row, hit.index), `${hit.band.text} ${phase} ${duration(took)}${moved}`];
  }

  private describeMemory(band: Band, x: number, y: number): string[] {
    const peak = this.page.ranks[band.rank].step(this.store.now.step).peaks.find((one) => one.tier === band.text);
    if (!band.chart || !peak) return [];
    const fraction = Math.max(0, (band.y + band.height - y) / (band.height - 15));
    const found = band.chart.at(this.axis.scale.invert(x), fraction, band.chart.scaleTop(peak));
    const lines = [`${bytes(found.total)} saved in ${band.text}`];
    if (found.layer >= 0) lines.unshift(`${printable(this.page.name(found.layer)) || "unnamed"}: ${bytes(found.nbytes)}`);
    return lines;
  }

  private hatch(): CanvasPattern | string {
    const tile = h("canvas", { width: "6", height: "6" });
    const brush = tile.getContext("2d");
    if (!brush) return theme().stall;
    brush.fillStyle = theme().background;
    brush.fillRect(0, 0, 6, 6);
    brush.strokeStyle = theme().stall;
    brush.lineWidth = 2.2;
    for (const shift of [-6, 0, 6]) {
      brush.beginPath();
      brush.moveTo(shift - 1, 7);
      brush.lineTo(shift + 7, -1);
      brush.stroke();
    }
    return this.context.createPattern(tile, "repeat") ?? theme().stall;
  }
}

function closest(row: Row, t: number, near: number): number {
  const first = firstVisible(row, t - near);
  for (let i = first; i < row.t.length && row.t[i] <= t + near; i++) {
    if (row.t[i] <= t && row.end[i] >= t) return i;
  }
  return first < row.t.length && row.t[first] <= t + near ? first : -1;
}
