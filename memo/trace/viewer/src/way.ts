// Draws what is selected: its span or stall framed, and a tensor's way as arrows from copy to copy.

import { linkHorizontal } from "d3-shape";
import { AXIS, slotOf, type Band } from "./bands";
import type { Row } from "./data";
import type { Pen } from "./lanes";
import type { Selection } from "./state";

export function drawSelection(pen: Pen, bands: Band[], scroll: number, selection: Selection): void {
  const { context } = pen;
  context.save();
  context.beginPath();
  context.rect(pen.left - 1, AXIS, pen.right - pen.left + 1, 1e5);
  context.clip();
  new Way(pen, bands, scroll, selection).draw();
  context.restore();
}

class Way {
  constructor(
    private readonly pen: Pen,
    private readonly bands: Band[],
    private readonly scroll: number,
    private readonly selection: Selection,
  ) {}

  draw(): void {
    const { kind, index, row, life } = this.selection;
    const { rows, stalls } = this.pen.rank;
    if (kind === "span") this.frame(rows[row], index);
    const lane = kind === "stall" ? this.pen.page.stallLane(stalls.cause[index]) : "";
    const band = this.own((one) => one.kind === "stalls" && one.text === lane);
    if (band) this.outline(stalls.t[index], stalls.t[index] + stalls.d[index], band.y - this.scroll, band.height);
    if (life >= 0) this.drawLife(life);
  }

  private drawLife(life: number): void {
    const { context, rank, scale, theme } = this.pen;
    const copies = rank.copiesOf(life);
    for (const [row, i] of copies) this.frame(row, i);
    context.strokeStyle = theme.accent;
    context.fillStyle = theme.accent;
    context.lineWidth = 1.75;
    const places = copies.map(([row, i]) => ({ t: row.t[i], end: row.end[i], y: this.middleOf(row) }));
    for (const [i, target] of places.entries()) {
      const source = places[i - 1];
      if (!source || source.y === null || target.y === null) continue;
      this.arrow([scale(source.end), source.y], [scale(Math.max(target.t, source.end)), target.y]);
    }
    context.lineWidth = 1;
    const compute = this.own((band) => band.kind === "rows" && band.text === "compute");
    if (!compute) return;
    const { lives } = rank;
    const points = [lives.start[life], ...lives.useT.subarray(lives.useAt[life], lives.useAt[life + 1])];
    for (const t of points) this.pin(scale(t), compute.y - this.scroll);
  }

  private arrow(from: [number, number], to: [number, number]): void {
    const { context } = this.pen;
    context.beginPath();
    linkHorizontal().context(context)({ source: from, target: to });
    context.stroke();
    context.beginPath();
    context.moveTo(to[0] + 2, to[1]);
    context.lineTo(to[0] - 6, to[1] - 4);
    context.lineTo(to[0] - 6, to[1] + 4);
    context.fill();
  }

  // A small triangle above the compute lane: where a tensor was saved and where it was used.
  private pin(x: number, y: number): void {
    const { context, left, right } = this.pen;
    if (x < left || x > right) return;
    context.beginPath();
    context.moveTo(x, y + 7);
    context.lineTo(x - 4, y - 1);
    context.lineTo(x + 4, y - 1);
    context.fill();
  }

  private own(wanted: (band: Band) => boolean): Band | undefined {
    return this.bands.find((band) => band.rank === this.selection.rank && wanted(band));
  }

  private place(row: Row): [number, number] | null {
    const band = this.own((one) => one.rows.includes(row));
    return band ? slotOf(band, band.rows.indexOf(row), band.y - this.scroll) : null;
  }

  private middleOf(row: Row): number | null {
    const place = this.place(row);
    return place && place[0] + place[1] / 2;
  }

  private frame(row: Row, i: number): void {
    const place = this.place(row);
    if (place) this.outline(row.t[i], row.end[i], ...place);
  }

  private outline(from: number, to: number, y: number, height: number): void {
    const { context, scale, left, right, theme } = this.pen;
    if (scale(to) < left || scale(from) > right) return;
    const x0 = Math.max(left, scale(from));
    const x1 = Math.min(right, Math.max(scale(to), x0 + 3));
    context.strokeStyle = theme.accent;
    context.lineWidth = 2;
    context.strokeRect(x0, y, x1 - x0, height);
    context.lineWidth = 1;
  }
}
