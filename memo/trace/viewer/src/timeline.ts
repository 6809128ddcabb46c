// The first view: lanes of every shown rank and the memory of each tier above one time axis, on one canvas.

import { TimeAxis } from "./axis";
import { AXIS, hitBand, slotOf, stackBands, type Band, type Hit } from "./bands";
import type { Page, PeakFigures, Rank } from "./data";
import { h } from "./dom";
import { bytes, duration, instant, printable, rate } from "./format";
import { drawQueue, drawRow, drawStalls, labelOf, queuedAt, type Pen } from "./lanes";
import { MemoryChart } from "./memory";
import type { Store } from "./state";
import { stallColour, theme } from "./theme";
import { drawSelection } from "./way";

const GUTTER = 96; // pixels for lane names
const FONT = "11px system-ui, sans-serif";
const NEAR = 3; // pixels

function named(band: Band): string {
  if (band.kind !== "memory") return band.text;
  return band.text === "disk" ? "on disk" : `${band.text} memory`;
}

export class Timeline {
  readonly element: HTMLElement;
  readonly canvas: HTMLCanvasElement;
  readonly axis: TimeAxis;
  moved: () => void = () => {}; // what else shows the visible interval
  pointer: number | null = null; // x of the mouse above the canvas
  private readonly context: CanvasRenderingContext2D;
  private readonly spacer: HTMLElement;
  private readonly tip: HTMLElement;
  private charts: MemoryChart[][] = [];
  private bands: Band[] = [];
  private width = 1;
  private height = 1;
  private asked = false;
  private readonly patterns = new Map<string, CanvasPattern | string>(); // of stalls, by lane

  // `extent` is what can be seen at most: by default the whole trace.
  constructor(private readonly page: Page, private readonly store: Store, extent: [number, number] = [page.begin, page.end]) {
    this.canvas = h("canvas", { class: "plot", role: "img", tabindex: "0", "aria-label": "Timeline" });
    this.tip = h("div", { class: "tip", role: "tooltip", hidden: "" });
    this.spacer = h("div", { class: "spacer" });
    this.element = h("div", { class: "timeline" }, h("div", { class: "stage" }, this.canvas, this.spacer), this.tip);
    const context = this.canvas.getContext("2d", { alpha: false });
    if (!context) throw new Error("no canvas");
    this.context = context;
    this.makeCharts();
    this.axis = new TimeAxis(this.canvas, ...extent, () => this.redraw());
    this.listen();
  }

  private makeCharts(): void {
    const { page, store } = this;
    this.charts = page.ranks.map((rank) =>
      (store.now.other ? rank.tiers : rank.without("other"))
        .map((series, i) => new MemoryChart(page.raw.tiers[i], series))
        .filter((chart) => !chart.series.isEmpty(-Infinity, Infinity)),
    );
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
    for (const lane of ["stalls", "collectives"]) this.patterns.set(lane, this.hatch(stallColour(theme(), lane)));
    const pen = this.pen(this.store.now.rank);
    this.context.font = FONT;
    for (const chart of this.charts[this.store.now.rank]) {
      const peak = this.peakOf(pen.rank, chart.tier);
      if (peak) chart.arrange(pen, peak, pen.rank.interval(this.store.now.step));
    }
    this.bands = stackBands(this.page, this.store.now, this.charts[this.store.now.rank], this.height);
    this.canvas.setAttribute("aria-label", `Timeline of ${this.bands.map((band) => named(band) + this.emptiness(band)).join(", ")}`);
    const last = this.bands.at(-1);
    this.spacer.style.height = `${Math.max(0, (last ? last.y + last.height : 0) + 6 - this.height)}px`;
    this.axis.resize(GUTTER, this.width - 8, this.height);
    this.redraw();
  }

  private peakOf(rank: Rank, tier: string): PeakFigures | undefined {
    return rank.step(this.store.now.step).peaks.find((one) => one.tier === tier);
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
    const { selection } = this.store.now;
    if (selection) drawSelection(this.pen(selection.rank), this.bands, scroll, selection);
    this.drawAxis();
    const [from, to] = this.axis.domain;
    this.canvas.dataset["from"] = String(from);
    this.canvas.dataset["to"] = String(to);
    this.moved();
  }

  private drawBand(band: Band, y: number): void {
    const { context } = this;
    const pen = this.pen(band.rank);
    context.fillStyle = band.kind === "title" ? pen.theme.text : pen.theme.faint;
    const middle = band.kind === "memory" ? y + 7 : y + band.height / 2;
    context.fillText(named(band), 8, middle, GUTTER - 12);
    if (band.kind === "rows") {
      context.fillStyle = pen.theme.band;
      context.fillRect(pen.left, y, pen.right - pen.left, band.height);
      band.rows.forEach((row, i) => drawRow(pen, row, ...slotOf(band, i, y)));
      const queue = pen.rank.queues.get(band.rows[0].lane);
      if (queue && queue.most) drawQueue(pen, queue, y, band.height);
    } else if (band.kind === "stalls") {
      drawStalls(pen, band.text, y, band.height, this.patterns.get(band.text) ?? "");
    } else if (band.kind === "memory" && !band.chart) {
      context.fillText(this.emptiness(band).trim(), pen.left + 4, middle);
    } else if (band.chart) {
      const peak = this.peakOf(pen.rank, band.text);
      if (peak) band.chart.draw(pen, peak, y, band.height, pen.rank.interval(this.store.now.step));
    }
  }

  private emptiness(band: Band): string {
    return band.kind === "memory" && !band.chart ? ` empty in step ${this.store.now.step}` : "";
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
      if ("other" in change) this.makeCharts();
      if (["allRanks", "rank", "step", "other"].some((key) => key in change)) this.layout();
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
    const near = ((this.axis.domain[1] - this.axis.domain[0]) / (this.width - GUTTER)) * NEAR;
    return hitBand(this.page, band, this.axis.scale.invert(x), y, near);
  }

  private choose(event: MouseEvent): void {
    const { x, hit } = this.at(event);
    if (hit?.band.kind === "memory" && hit.band.chart) {
      const tier = this.page.raw.tiers.indexOf(hit.band.text);
      const [at, near] = [this.axis.scale.invert(x), this.axis.scale.invert(x + NEAR) - this.axis.scale.invert(x)];
      const t = hit.band.chart.snap(at, near, this.page.ranks[hit.band.rank].interval(this.store.now.step));
      this.store.set({ selection: { kind: "instant", rank: hit.band.rank, t, tier, life: -1, row: -1, index: -1 } });
      return;
    }
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
      const waited = hit.band.text === "collectives" ? "waits for a collective" : `${cause} stall`;
      return [`${waited}, ${duration(stalls.d[hit.index])}`, printable(this.page.name(stalls.name[hit.index]))];
    }
    const took = hit.row.end[hit.index] - hit.row.t[hit.index];
    const nbytes = hit.row.nbytes[hit.index];
    const phase = this.page.raw.phases[hit.row.phase[hit.index]];
    const moved = nbytes ? `, ${bytes(nbytes)} at ${rate(took ? (nbytes / took) * 1e9 : null)}` : "";
    const queue = rank.queues.get(hit.row.lane);
    const queued = queue ? [`${bytes(queuedAt(queue, this.axis.scale.invert(x)))} of at most ${bytes(queue.most)} queued`] : [];
    return [labelOf(this.page, rank, hit.row, hit.index), `${hit.band.text} ${phase} ${duration(took)}${moved}`, ...queued];
  }

  private describeMemory(band: Band, x: number, y: number): string[] {
    const peak = this.peakOf(this.page.ranks[band.rank], band.text);
    if (!band.chart || !peak) return [];
    const fraction = Math.max(0, (band.y + band.height - y) / (band.height - band.chart.header));
    const found = band.chart.at(this.axis.scale.invert(x), fraction, band.chart.scaleTop(peak));
    const lines = [`${bytes(found.total)} ${band.chart.series.whole ? "in all" : "saved"} in ${band.text}`];
    if (found.layer >= 0) lines.unshift(`${printable(this.page.name(found.layer)) || "unnamed"}: ${bytes(found.nbytes)}`);
    return lines;
  }

  private hatch(colour: string): CanvasPattern | string {
    const tile = h("canvas", { width: "6", height: "6" });
    const brush = tile.getContext("2d");
    if (!brush) return colour;
    brush.fillStyle = theme().background;
    brush.fillRect(0, 0, 6, 6);
    brush.strokeStyle = colour;
    brush.lineWidth = 2.2;
    for (const shift of [-6, 0, 6]) {
      brush.beginPath();
      brush.moveTo(shift - 1, 7);
      brush.lineTo(shift + 7, -1);
      brush.stroke();
    }
    return this.context.createPattern(tile, "repeat") ?? colour;
  }
}
