// Draws one row of spans at any zoom: wide spans as labelled blocks, dense ones as the share of each pixel they cover.

import type { ScaleLinear } from "d3-scale";
import { above, type Page, type Queue, type Rank, type Row } from "./data";
import { printable } from "./format";
import type { Looking } from "./state";
import { inkOn, laneColour, layerColour, stallColour, type Theme } from "./theme";

const NARROW = 1.5; // pixels under which a span is not drawn on its own
const CHARACTER = 6.1; // pixels, about, at 11 px
const DIMMED = 0.18;
const FOOT = 4; // pixels at the foot of a span, in the colour that its layer has in the memory too

export interface Pen {
  context: CanvasRenderingContext2D;
  scale: ScaleLinear<number, number>;
  left: number;
  right: number;
  page: Page;
  rank: Rank;
  looking: Looking;
  theme: Theme;
}

export function firstVisible(row: { end: Float64Array }, from: number): number {
  return above(row.end, from);
}

export function drawRow(pen: Pen, row: Row, y: number, height: number): void {
  const { context, scale, page } = pen;
  const [from, to] = scale.domain();
  const perNs = (pen.right - pen.left) / (to - from);
  const lane = page.raw.lanes[row.lane];
  const colours = page.raw.phases.map((phase) => laneColour(lane, phase));
  const bin = { x: -1, covered: 0, phase: 0, bright: false };

  const flush = (): void => {
    if (bin.x < 0) return;
    context.globalAlpha = (0.3 + 0.7 * Math.min(1, bin.covered)) * (bin.bright ? 1 : DIMMED);
    context.fillStyle = colours[bin.phase];
    context.fillRect(bin.x, y, 1, height);
    bin.x = -1;
  };

  for (let i = firstVisible(row, from); i < row.t.length && row.t[i] < to; i++) {
    const x0 = pen.left + (row.t[i] - from) * perNs;
    const x1 = pen.left + (row.end[i] - from) * perNs;
    const bright = isBright(pen, row, i);
    if (x1 - x0 < NARROW) {
      const x = Math.floor(x0);
      if (x !== bin.x || row.phase[i] !== bin.phase) flush();
      if (bin.x < 0) Object.assign(bin, { x, covered: 0, phase: row.phase[i], bright: false });
      bin.covered += x1 - x0;
      bin.bright ||= bright;
      continue;
    }
    flush();
    context.globalAlpha = bright ? 1 : DIMMED;
    context.fillStyle = colours[row.phase[i]];
    const left = Math.max(x0, pen.left);
    const width = Math.max(1, Math.min(x1, pen.right) - left - (x1 - x0 > 4 ? 0.75 : 0));
    context.fillRect(left, y, width, height);
    const layer = lane === "compute" && height >= 11 && width > 3 ? layerOf(page, pen.rank, row, i) : undefined;
    if (layer !== undefined) {
      context.fillStyle = layerColour(layer, page.layers.size);
      context.fillRect(left, y + height - FOOT, width, FOOT);
    }
    if (height >= 11 && width > 26) label(pen, labelOf(page, pen.rank, row, i), left, y, width, height, colours[row.phase[i]]);
  }
  flush();
  context.globalAlpha = 1;
}

function isBright({ looking, rank }: Pen, row: Row, i: number): boolean {
  const { hits } = looking;
  if (hits === null) return true;
  return hits[row.name[i]] === 1 || (row.life[i] >= 0 && rank.found(hits, row.life[i]));
}

export function labelOf(page: Page, rank: Rank, row: Row, i: number): string {
  if (row.merged && row.merged[i] > 1) return `${row.merged[i]} merged`;
  const name = row.name[i] || (row.life[i] >= 0 ? rank.lives.name[row.life[i]] : 0);
  return printable(page.name(name)) || page.raw.phases[row.phase[i]] || page.raw.lanes[row.lane];
}

// The place of the layer that a span belongs to, among all layers that saved anything; undefined for none.
function layerOf(page: Page, rank: Rank, row: Row, i: number): number | undefined {
  return page.layerPlace(row.name[i] || (row.life[i] >= 0 ? rank.lives.name[row.life[i]] : 0));
}

function label(pen: Pen, text: string, x: number, y: number, width: number, height: number, colour: string): void {
  const room = Math.floor((width - 6) / CHARACTER);
  const fitted = fit(text, room);
  if (!fitted) return;
  pen.context.fillStyle = inkOn(colour);
  pen.context.fillText(fitted, x + 3, y + (height - (height > 15 ? FOOT : 0)) / 2 + 0.5, width - 5);
}

// The end of a module's name tells more than its beginning: `layers.4` of `model.layers.4`, or `4` where room is short.
export function fit(text: string, room: number): string {
  const parts = text.split(".");
  const tail = parts.slice(-2).join(".");
  const last = parts[parts.length - 1];
  const numbered = /^\d+$/.test(last);
  return (numbered ? [tail, last] : [text, tail, last]).find((candidate) => candidate.length <= room) ?? "";
}

// The queue of a lane as a line over its spans; the band's top is the most that ever was queued.
export function drawQueue(pen: Pen, queue: Queue, y: number, height: number): void {
  const { context, scale, theme } = pen;
  const [from, to] = scale.domain();
  const level = (nbytes: number): number => y + height - 1 - (nbytes / queue.most) * (height - 2);
  let i = Math.max(0, above(queue.t, from) - 1);
  let at = level(queue.t[i] <= from ? queue.nbytes[i] : 0);
  context.strokeStyle = theme.text;
  context.globalAlpha = 0.6;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(pen.left, at);
  for (; i < queue.t.length && queue.t[i] < to; i++) {
    const x = Math.max(pen.left, scale(queue.t[i]));
    context.lineTo(x, at);
    at = level(queue.nbytes[i]);
    context.lineTo(x, at);
  }
  context.lineTo(pen.right, at);
  context.stroke();
  context.globalAlpha = 1;
}

export function queuedAt(queue: Queue, t: number): number {
  const i = above(queue.t, t) - 1;
  return i < 0 ? 0 : queue.nbytes[i];
}

// The stalls of a lane as hatched blocks, each at least a pixel and a half wide so that none is lost from sight.
export function drawStalls(pen: Pen, lane: string, y: number, height: number, hatch: CanvasPattern | string): void {
  const { context, scale, rank, page, theme } = pen;
  const [from, to] = scale.domain();
  const { stalls } = rank;
  let covered = -1;
  for (let i = 0; i < stalls.length && stalls.t[i] < to; i++) {
    const end = stalls.t[i] + stalls.d[i];
    if (end < from || page.stallLane(stalls.cause[i]) !== lane) continue;
    const x0 = Math.max(scale(stalls.t[i]), pen.left);
    const x1 = Math.max(Math.min(scale(end), pen.right), x0 + 1.5);
    if (x1 <= covered) continue;
    covered = x1;
    context.fillStyle = hatch;
    context.fillRect(x0, y, x1 - x0, height);
    context.strokeStyle = stallColour(theme, lane);
    if (x1 - x0 > 5) context.strokeRect(x0 + 0.5, y + 0.5, x1 - x0 - 1, height - 1);
    const text = page.raw.causes[stalls.cause[i]];
    if (x1 - x0 > text.length * CHARACTER + 10) {
      const width = text.length * CHARACTER + 4;
      context.fillStyle = theme.background;
      context.fillRect(x0 + 3, y + 1.5, width, height - 3);
      context.fillStyle = theme.text;
      context.fillText(text, x0 + 5, y + height / 2 + 0.5);
    }
  }
}
