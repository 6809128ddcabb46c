// Draws bytes in one tier over time, stacked by layer; on the device with weights, gradients, optimizer state and the rest,
// so that the top is all that the device held. The peak of the chosen step is marked. Each pixel column shows the instant of its largest total, so a
// peak is never averaged away; columns are written as pixels, which costs the same at any number of layers.

import { scaleLinear } from "d3-scale";
import { line, curveStepAfter } from "d3-shape";
import { above, type Page, type PeakFigures, type TierSeries } from "./data";
import { bytes } from "./format";
import type { Pen } from "./lanes";
import { bandColour } from "./band_colours";
import { channels, layerColour } from "./theme";

export const LINE = 15; // pixels for a line of the caption
const ROOM = 6; // pixels below it, for the mark of the peak
const RED = "#c0392b";
const OFF_SCALE = 2.5; // a line above this many peaks would flatten the chart, and is named instead of drawn

// A size drawn as a line across the chart.
interface Mark {
  nbytes: number;
  colour: string;
  dash: number[];
  text: string;
}

// A part of the caption: a line's or (without a dash) a band's colour, and what it is.
interface Entry {
  text: string;
  colour: string;
  dash: number[] | null;
  x: number;
  line: number;
}

// Pixels for the line or the patch before a text; the first has none.
function keyWidth({ dash }: Pick<Entry, "dash">, place: number): number {
  return place ? (dash ? 18 : 13) : 0;
}

export class MemoryChart {
  private readonly raster = document.createElement("canvas");
  private image: ImageData | null = null;
  private colours: Uint32Array = new Uint32Array();
  private coloursFor = "";
  private held: Float64Array;
  private readonly counterPeak: number;

  header = LINE; // pixels for the caption
  private caption: Entry[] = [];

  constructor(readonly tier: string, readonly series: TierSeries) {
    this.held = new Float64Array(series.layers.length);
    this.counterPeak = series.counterBytes.reduce((a, b) => Math.max(a, b), 0);
  }

  draw(pen: Pen, figures: PeakFigures, y: number, height: number, step: [number, number]): void {
    const { context, left, right, theme } = pen;
    const shown = this.marks(figures, pen).filter((mark) => this.onScale(mark.nbytes));
    const top = this.scaleTop(figures);
    const scaleY = scaleLinear().domain([0, top]).range([y + height, y + this.header]);
    context.fillStyle = theme.band;
    context.fillRect(left, y + this.header, right - left, height - this.header);
    this.drawStack(pen, y + this.header, height - this.header, top);
    if (!this.series.whole && this.onScale(this.counterPeak)) this.drawCounters(pen, this.countersIn(pen), scaleY);
    context.font = "11px system-ui, sans-serif";
    for (const mark of shown) {
      const at = Math.round(scaleY(mark.nbytes)) + 0.5;
      context.strokeStyle = mark.colour;
      context.setLineDash(mark.dash);
      context.beginPath();
      context.moveTo(left, at);
      context.lineTo(right, at);
      context.stroke();
    }
    context.setLineDash([]);
    const peak = this.series.whole ? this.series.peakWithin(...step) : null;
    if (peak) this.drawPeak(pen, peak, scaleY(peak.nbytes));
    if (peak) context.canvas.dataset["memory"] = String(y + height - 4);
    this.drawInstants(pen, y, height);
    this.drawCaption(pen, y);
    this.ticks(pen, top, scaleY);
  }

  // One or two sizes beside the chart, in powers of two.
  private ticks({ context, theme, left }: Pen, top: number, scaleY: (nbytes: number) => number): void {
    const step = 2 ** Math.floor(Math.log2(top / 1.5));
    context.fillStyle = theme.faint;
    context.textAlign = "right";
    for (let nbytes = step; nbytes < top; nbytes += step) {
      context.fillRect(left - 4, Math.round(scaleY(nbytes)), 4, 1);
      context.fillText(bytes(nbytes), left - 7, scaleY(nbytes) + 1);
    }
    context.textAlign = "left";
  }

  // Bytes at the top of the chart: the same at every zoom, so that heights compare.
  scaleTop(figures: PeakFigures): number {
    const { whole, hidden, peak } = this.series;
    const others = hidden === undefined ? [figures.budget_nbytes, whole ? null : figures.predicted_nbytes, this.counterPeak] : [];
    return Math.max(peak, ...others.filter((nbytes) => nbytes !== null).filter((nbytes) => this.onScale(nbytes)), 1) * 1.04;
  }

  private onScale(nbytes: number): boolean {
    return nbytes > 0 && (this.series.peak === 0 || nbytes <= this.series.peak * OFF_SCALE);
  }

  // The layer under a point and its bytes, with the total: what the tooltip says.
  at(t: number, fraction: number, top: number): { layer: number; nbytes: number; total: number } {
    const index = above(this.series.t, t);
    this.series.before(index, this.held);
    const total = index ? this.series.total[index - 1] : 0;
    let below = 0;
    for (let layer = 0; layer < this.held.length; layer++) {
      below += this.held[layer];
      if (below >= fraction * top) return { layer: this.series.layers[layer], nbytes: this.held[layer], total };
    }
    return { layer: -1, nbytes: 0, total };
  }

  private marks(figures: PeakFigures, { theme }: Pen): Mark[] {
    const found: Mark[] = [];
    if (this.series.hidden !== undefined) return found; // a budget counts what is hidden, too
    if (figures.budget_nbytes) {
      found.push({ nbytes: figures.budget_nbytes, colour: theme.budget, dash: [], text: `budget ${bytes(figures.budget_nbytes)}` });
    }
    if (figures.predicted_nbytes && !this.series.whole) { // a prediction of the saved bytes alone
      found.push({ nbytes: figures.predicted_nbytes, colour: theme.plan, dash: [5, 4], text: `plan ${bytes(figures.predicted_nbytes)}` });
    }
    return found;
  }

  // The instant that a click near `t` means: the peak of the step where it is within `near`.
  snap(t: number, near: number, step: [number, number]): number {
    const peak = this.series.whole ? this.series.peakWithin(...step) : null;
    return peak && Math.abs(peak.t - t) <= near ? peak.t : t;
  }

  // A triangle at the peak of the step, above the stack.
  private drawPeak({ context, scale, left, right, theme }: Pen, peak: { t: number; nbytes: number }, y: number): void {
    context.canvas.dataset["peak"] = `${peak.t} ${peak.nbytes}`;
    const x = scale(peak.t);
    if (x < left || x > right) return;
    context.fillStyle = theme.text;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - 5, y - 8);
    context.lineTo(x + 5, y - 8);
    context.fill();
  }

  // Lines across the chart: the chosen instant, and where memory ran out.
  private drawInstants({ context, scale, left, right, page, rank, looking, theme }: Pen, y: number, height: number): void {
    const line = (t: number, colour: string, text: string): void => {
      const x = Math.round(scale(t));
      if (x < left || x > right) return;
      context.fillStyle = colour;
      context.fillRect(x, y + this.header, 1.5, height - this.header);
      if (!text) return;
      const width = context.measureText(text).width;
      context.fillText(text, x + width + 6 > right ? x - width - 4 : x + 5, y + this.header + 7);
    };
    const { selection } = looking;
    const chosen = selection?.kind === "instant" && page.ranks[selection.rank] === rank && page.raw.tiers[selection.tier ?? -1] === this.tier;
    if (chosen && selection.t !== undefined) line(selection.t, theme.accent, "");
    if (this.tier !== "device") return;
    for (const note of rank.notes) if (note.cause === "out-of-memory") line(note.t, RED, "out of memory");
  }

  // Lays out the caption: the peak, the lines, and the bands with what each held at the peak, on as many lines as they need.
  arrange(pen: Pen, figures: PeakFigures, step: [number, number]): void {
    const { context, page, left, right, theme } = pen;
    const peak = this.series.whole ? this.series.peakWithin(...step) : null;
    const without = this.series.hidden === undefined ? "" : ` without ${page.name(this.series.hidden)}`;
    const said: Omit<Entry, "x" | "line">[] = [
      { text: peak ? `peak ${bytes(peak.nbytes)}${without}` : `peak ${bytes(figures.saved_nbytes)} saved by layer`, colour: theme.text, dash: null },
    ];
    const off = (nbytes: number): string => (this.onScale(nbytes) ? "" : " (off the scale)");
    if (!peak && figures.measured_nbytes !== null) {
      const word = page.raw.meta["simulated"] === true ? "predicted" : "measured";
      const text = `all ${word} ${bytes(figures.measured_nbytes)}${off(this.counterPeak)}`;
      said.push({ text, colour: theme.measured, dash: [] });
    }
    for (const mark of this.marks(figures, pen)) said.push({ ...mark, text: `${mark.text}${off(mark.nbytes)}` });
    if (peak) said.push(...this.legend(page, peak.t));
    let [x, line] = [left + 4, 0];
    this.caption = said.map((entry, i) => {
      const wide = keyWidth(entry, i) + context.measureText(entry.text).width;
      if (i && x + wide > right) [x, line] = [left + 4, line + 1];
      const placed = { ...entry, x, line };
      x += wide + 14;
      return placed;
    });
    this.header = (line + 1) * LINE + (peak ? ROOM : 0);
  }

  private drawCaption({ context, theme }: Pen, y: number): void {
    this.caption.forEach(({ text, colour, dash, x, line }, i) => {
      const top = y + line * LINE;
      [context.fillStyle, context.strokeStyle] = [colour, colour];
      if (dash) {
        context.setLineDash(dash);
        context.beginPath();
        context.moveTo(x, top + 7.5);
        context.lineTo(x + 14, top + 7.5);
        context.stroke();
        context.setLineDash([]);
      } else if (i) context.fillRect(x, top + 3, 9, 9);
      if (i) context.fillStyle = theme.faint;
      context.fillText(text, x + keyWidth({ dash }, i), top + 7);
    });
    context.canvas.dataset[`${this.tier}Caption`] = this.caption.map(({ text }) => text).join("; ");
  }

  // The bands that held anything at `t`, the largest first.
  private legend(page: Page, t: number): Omit<Entry, "x" | "line">[] {
    const { series } = this;
    series.before(above(series.t, t), this.held);
    const layersEnd = series.layers.length - series.above;
    const saved = this.held.slice(series.below, layersEnd).reduce((a, b) => a + b, 0);
    const parts: [string, number, number][] = [["saved by layer", saved, Math.floor((series.below + layersEnd - 1) / 2)]];
    series.layers.forEach((name, band) => {
      if (band < series.below || band >= layersEnd) parts.push([page.name(name), this.held[band], band]);
    });
    const held = parts.filter(([, nbytes]) => nbytes > 0).sort((a, b) => b[1] - a[1]);
    return held.map(([name, nbytes, band]) => ({ text: `${name} ${bytes(nbytes)}`, colour: this.colourOf(page, band), dash: null }));
  }

  private colourOf(page: Page, place: number): string {
    const { below, layers, above: over } = this.series;
    const isLayer = place >= below && place < layers.length - over;
    return isLayer ? layerColour(page.layers.get(layers[place]) ?? 0, page.layers.size) : bandColour(page.name(layers[place]));
  }

  private countersIn({ scale, right }: Pen): [number, number][] {
    const { counterT, counterBytes } = this.series;
    const [from, to] = scale.domain();
    const begin = Math.max(0, above(counterT, from) - 1);
    const points: [number, number][] = [];
    let pixel = -1;
    for (let i = begin; i < counterT.length && counterT[i] <= to; i++) {
      const x = Math.floor(scale(counterT[i]));
      const last = points.at(-1);
      if (x === pixel && last) last[1] = Math.max(last[1], counterBytes[i]);
      else points.push([counterT[i], counterBytes[i]]);
      pixel = x;
    }
    const last = points.at(-1);
    if (last) points.push([Math.min(to, scale.invert(right)), last[1]]);
    return points;
  }

  private drawCounters({ context, scale, left, theme }: Pen, points: [number, number][], scaleY: (nbytes: number) => number): void {
    context.strokeStyle = theme.measured;
    context.lineWidth = 1.25;
    context.beginPath();
    line<[number, number]>((point) => Math.max(left, scale(point[0])), (point) => scaleY(point[1]))
      .curve(curveStepAfter)
      .context(context)(points);
    context.stroke();
    context.lineWidth = 1;
  }

  private drawStack(pen: Pen, y: number, height: number, top: number): void {
    const { context, scale, left, right } = pen;
    const [width, rows] = [Math.floor(right - left), Math.floor(height)];
    if (width < 1 || rows < 1) return;
    if (this.raster.width !== width || this.raster.height !== rows) {
      this.raster.width = width;
      this.raster.height = rows;
    }
    const brush = this.raster.getContext("2d");
    if (!brush) return;
    this.colourLayers(pen);
    if (this.image?.width !== width || this.image.height !== rows) this.image = brush.createImageData(width, rows);
    const pixels = new Uint32Array(this.image.data.buffer);
    pixels.fill(0);
    this.fill(pixels, width, rows, scale.domain() as [number, number], rows / top);
    brush.putImageData(this.image, 0, 0);
    context.drawImage(this.raster, left, y);
  }

  private fill(pixels: Uint32Array, width: number, rows: number, [from, to]: [number, number], perByte: number): void {
    const { t, total, layer, delta } = this.series;
    const held = this.held;
    let next = above(t, from); // changes [0, next) lie left of the column
    this.series.before(next, held);
    let sum = next ? total[next - 1] : 0;
    for (let column = 0; column < width; column++) {
      const until = from + ((column + 1) * (to - from)) / width;
      let best = next; // the column shows the state after the changes [0, best)
      let most = sum;
      let end = next;
      for (; end < t.length && t[end] < until; end++) {
        if (total[end] > most) {
          most = total[end];
          best = end + 1;
        }
      }
      for (; next < best; next++) held[layer[next]] += delta[next];
      if (most > 0) this.fillColumn(pixels, width, rows, column, perByte);
      for (; next < end; next++) held[layer[next]] += delta[next];
      sum = end ? total[end - 1] : 0;
    }
  }

  private fillColumn(pixels: Uint32Array, width: number, rows: number, column: number, perByte: number): void {
    let below = 0;
    let filled = 0;
    for (let place = 0; place < this.held.length; place++) {
      below += this.held[place] * perByte;
      const until = Math.min(rows, Math.round(below));
      for (; filled < until; filled++) pixels[(rows - 1 - filled) * width + column] = this.colours[place];
    }
  }

  private colourLayers({ looking, page, rank, theme }: Pen): void {
    const { layers } = this.series;
    const selected = looking.selection && looking.selection.life >= 0 ? page.name(rank.lives.name[looking.selection.life]) : "";
    const wanted = `${theme.background} ${looking.query} ${selected}`;
    if (wanted === this.coloursFor && this.colours.length === layers.length) return;
    this.coloursFor = wanted;
    const background = channels(theme.band);
    const query = looking.query.toLowerCase();
    const matching = layers.map((name) => looking.hits?.[name] === 1 || (name !== 0 && query.startsWith(page.name(name).toLowerCase())));
    const any = matching.includes(true); // none, where an operation or a shape is searched
    this.colours = Uint32Array.from(layers, (name, place) => {
      const layer = page.name(name);
      const matched = !any || matching[place];
      const chosen = !selected || selected === layer || selected.startsWith(`${layer}.`);
      const colour = channels(this.colourOf(page, place));
      const share = matched && chosen ? 1 : 0.3;
      const [red, green, blue] = colour.map((value, i) => Math.round(value * share + background[i] * (1 - share)));
      return (255 << 24) | (blue << 16) | (green << 8) | red;
    });
  }
}
