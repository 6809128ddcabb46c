// The shared time axis: which interval is visible, moved by wheel, drag and keys through d3-zoom.

import { scaleLinear, type ScaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomBehavior } from "d3-zoom";

const CLOSEST_NS = 1000; // the narrowest interval that can be shown

export class TimeAxis {
  scale: ScaleLinear<number, number>;
  private readonly behavior: ZoomBehavior<HTMLCanvasElement, unknown>;
  private base: ScaleLinear<number, number>;
  private left = 0;
  private right = 1;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly begin: number,
    private readonly end: number,
    changed: () => void,
  ) {
    this.base = scaleLinear().domain([begin, end]).range([0, 1]);
    this.scale = this.base.copy();
    this.behavior = zoom<HTMLCanvasElement, unknown>()
      .scaleExtent([1, Math.max(1, (end - begin) / CLOSEST_NS)])
      .filter((event: MouseEvent) => !event.shiftKey && event.button === 0)
      .clickDistance(4)
      .on("zoom", (event: { transform: { rescaleX(scale: ScaleLinear<number, number>): ScaleLinear<number, number> } }) => {
        this.scale = event.transform.rescaleX(this.base);
        changed();
      });
    select(canvas).call(this.behavior).on("dblclick.zoom", null);
  }

  get domain(): [number, number] {
    return this.scale.domain() as [number, number];
  }

  // The canvas has this plot area now; what was visible stays visible.
  resize(left: number, right: number, height: number): void {
    const shown = this.right > 1 ? this.domain : null;
    [this.left, this.right] = [left, Math.max(right, left + 1)];
    this.base = scaleLinear().domain([this.begin, this.end]).range([this.left, this.right]);
    const extent: [[number, number], [number, number]] = [[this.left, 0], [this.right, height]];
    this.behavior.extent(extent).translateExtent([[this.left, -1e9], [this.right, 1e9]]);
    this.show(...(shown ?? [this.begin, this.end]));
  }

  // Makes [from, to] the visible interval.
  show(from: number, to: number): void {
    const wide = Math.max(to - from, CLOSEST_NS);
    const k = Math.max(1, (this.end - this.begin) / wide);
    const x = this.left - k * this.base(from);
    select(this.canvas).call(this.behavior.transform, zoomIdentity.translate(x, 0).scale(k));
  }

  // The same, with a margin on both sides.
  around(from: number, to: number, margin = 0.5): void {
    const wide = Math.max(to - from, CLOSEST_NS);
    this.show(from - wide * margin, to + wide * margin);
  }

  pan(pixels: number): void {
    const [a, b] = this.domain;
    const k = (this.end - this.begin) / (b - a);
    select(this.canvas).call(this.behavior.translateBy, -pixels / k, 0);
  }

  zoomBy(factor: number, at: number | null): void {
    const point: [number, number] = [at ?? (this.left + this.right) / 2, 0];
    select(this.canvas).call(this.behavior.scaleBy, factor, point);
  }
}
