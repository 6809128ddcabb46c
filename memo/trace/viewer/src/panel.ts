// The side panel: what is selected, the ranked tables, the figures and what the run was.

import type { Figures, Page, Rank } from "./data";
import { h, table, type Cell } from "./dom";
import { bytes, count, duration, percent, printable, rate } from "./format";
import { selectionTab } from "./story";
import type { Selection, Store } from "./state";
import { tensorTable } from "./tensors";

const TOP = 100; // rows of a ranked table

export interface Guide {
  show(from: number, to: number): void; // brings an interval into view
}

type Tab = "selection" | "stalls" | "tensors" | "figures" | "run";

const TITLES: Record<Tab, string> = {
  selection: "Selection",
  stalls: "Stalls",
  tensors: "Tensors",
  figures: "Figures",
  run: "Run",
};

export class Panel {
  readonly element: HTMLElement;
  private readonly body: HTMLElement;
  private readonly buttons: Record<Tab, HTMLButtonElement>;
  private tab: Tab = "figures";

  constructor(private readonly page: Page, private readonly store: Store, private readonly guide: Guide) {
    const entries = (Object.keys(TITLES) as Tab[]).map((tab) => {
      const button = h("button", { role: "tab", type: "button", id: `tab-${tab}` }, TITLES[tab]);
      button.addEventListener("click", () => this.open(tab));
      return [tab, button] as const;
    });
    this.buttons = Object.fromEntries(entries) as Record<Tab, HTMLButtonElement>;
    this.body = h("div", { class: "body", role: "tabpanel", id: "panel-body" });
    const bar = h("div", { class: "tabs", role: "tablist", "aria-label": "Details" }, ...entries.map(([, button]) => button));
    this.element = h("aside", { class: "panel" }, bar, this.body);
    store.watch((change) => {
      if (change.selection) this.open("selection");
      else if (change.query) this.open("tensors");
      else this.render();
    });
    this.render();
  }

  private open(tab: Tab): void {
    this.tab = tab;
    this.render();
    this.body.scrollTop = 0;
  }

  private render(): void {
    for (const [tab, button] of Object.entries(this.buttons)) {
      button.setAttribute("aria-selected", String(tab === this.tab));
    }
    this.body.replaceChildren(...this.content());
  }

  private content(): Node[] {
    const rank = this.page.ranks[this.store.now.rank];
    const figures = rank.step(this.store.now.step);
    switch (this.tab) {
      case "selection":
        return selectionTab(this.page, this.store.now, (selection) => this.select(selection));
      case "stalls":
        return this.stalls(rank);
      case "tensors":
        return this.tensors(rank);
      case "figures":
        return figuresTab(figures, this.page.ranks.length > 1 ? `, rank ${rank.rank}` : "");
      case "run":
        return this.run(rank);
    }
  }

  private select(selection: Selection): void {
    const rank = this.page.ranks[selection.rank];
    if (selection.kind === "stall") {
      const { t, d } = rank.stalls;
      this.guide.show(t[selection.index] - d[selection.index], t[selection.index] + 2 * d[selection.index]);
    } else if (selection.life >= 0) {
      const [start, end] = [rank.lives.start[selection.life], rank.lives.end[selection.life]];
      this.guide.show(start - (end - start) * 0.08, end + (end - start) * 0.08);
    }
    this.store.set({ selection });
  }

  private stalls(rank: Rank): Node[] {
    const { stalls } = rank;
    const { step, hits } = this.store.now;
    const all = [...Array(stalls.length).keys()]
      .filter((i) => (step === null || stalls.step[i] === step) && (hits === null || this.isFound(rank, i, hits)))
      .sort((a, b) => stalls.d[b] - stalls.d[a]);
    const [copies, collectives] = ["stalls", "collectives"].map((lane) => all.filter((i) => this.page.stallLane(stalls.cause[i]) === lane));
    return [
      copies.length ? this.stallTable(rank, copies, "stalls") : h("p", {}, "No stall here: nothing waited for a copy."),
      ...(collectives.length ? [this.stallTable(rank, collectives, "waits for collectives")] : []),
    ];
  }

  private stallTable(rank: Rank, chosen: number[], what: string): HTMLElement {
    const { stalls } = rank;
    const rows: Cell[][] = chosen.slice(0, TOP).map((i) => [
      [duration(stalls.d[i]), stalls.d[i]],
      this.page.raw.causes[stalls.cause[i]],
      printable(this.page.name(this.stallName(rank, i))),
    ]);
    const of = this.page.ranks.length > 1 ? ` of rank ${rank.rank}` : "";
    const caption = `${count(chosen.length)} ${what}${of}, longest first`;
    const pick = (row: number): void =>
      this.select({ kind: "stall", rank: this.store.now.rank, index: chosen[row], life: stalls.life[chosen[row]], row: -1 });
    return table(caption, ["waited", "cause", "module"], rows, pick);
  }

  private isFound(rank: Rank, i: number, hits: Uint8Array): boolean {
    const { stalls } = rank;
    return hits[stalls.name[i]] === 1 || (stalls.life[i] >= 0 && rank.found(hits, stalls.life[i]));
  }

  private stallName(rank: Rank, i: number): number {
    const { stalls, lives } = rank;
    return stalls.life[i] >= 0 ? lives.name[stalls.life[i]] : stalls.name[i];
  }

  private tensors(rank: Rank): Node[] {
    const { lives } = rank;
    const { step, hits, query } = this.store.now;
    const weight = (i: number): number => lives.nbytes[i] * (lives.end[i] - lives.start[i]);
    const chosen = [...Array(lives.length).keys()]
      .filter((i) => (step === null || lives.step[i] === step) && (hits === null || rank.found(hits, i)))
      .sort((a, b) => weight(b) - weight(a));
    const what = hits === null ? "tensors" : `tensors match “${printable(query)}”`;
    if (!chosen.length) return [h("p", { id: "matches" }, `No ${what} in this step.`)];
    const pick = (life: number): void => this.select({ kind: "life", rank: this.store.now.rank, life, row: -1, index: -1 });
    const shown = chosen.length > TOP ? `, the first ${TOP}` : "";
    const caption = `${count(chosen.length)} ${what}; by bytes × lifetime${shown}`;
    const list = tensorTable(this.page, rank, caption, chosen.slice(0, TOP), pick);
    list.id = "matches";
    const wants = lives.op.some((name) => name > 0) && !lives.line.some((name) => name > 0) && this.page.raw.meta["simulated"] !== true;
    return wants ? [list, h("p", {}, "The Python lines of each tensor: memo train --trace-stacks, memo.offload(trace_stacks=True).")] : [list];
  }

  private run(rank: Rank): Node[] {
    const { meta } = this.page.raw;
    const own: Record<string, unknown> = {
      file: rank.figures.path,
      rank: `${rank.rank} of ${rank.figures.world_size}`,
      events: count(rank.figures.events),
      dropped: count(rank.figures.dropped_events),
    };
    const notes = rank.notes.map((note): Cell[] => [note.cause, printable(note.message, 300)]);
    return [
      ...rank.figures.remarks.map((remark) => h("p", { class: "remark" }, remark)),
      ...(rank.thinned ? [h("p", { class: "remark" }, rank.thinned)] : []),
      table("This trace", ["", ""], Object.entries(own).map(([key, value]) => [key, printable(String(value), 200)])),
      ...Object.entries(meta).flatMap(([key, value]) => metaEntry(key, value)),
      ...(notes.length ? [table("Warnings and fallbacks", ["cause", "message"], notes)] : []),
    ];
  }
}

// An entry of the header; nothing of one without a value.
function metaEntry(key: string, value: unknown): HTMLElement[] {
  const title = printable(key);
  if (value === null) return [];
  if (typeof value !== "object") {
    const text = printable(String(value), 600).split(" ").flatMap((word) => [h("span", { class: "word" }, word), " "]);
    return [h("section", {}, h("h3", {}, title), h("p", { class: "meta" }, ...text))];
  }
  const rows = flat(value, "").filter(([, text]) => text !== null).slice(0, 400).map(([name, text]): Cell[] => [printable(name), printable(metaText(`${key}.${name}`, text), 200)]);
  return rows.length ? [table(title, ["", ""], rows)] : [];
}

// Sizes and rates written for people; everything else as it is.
function metaText(name: string, value: unknown): string {
  if (typeof value !== "number") return String(value);
  if (name.includes("bytes_per_s")) return rate(value);
  return /^budgets|nbytes/.test(name) ? bytes(value) : String(value);
}

function flat(value: object, prefix: string): [string, unknown][] {
  return Object.entries(value).flatMap(([key, item]) => {
    const name = prefix ? `${prefix}.${key}` : key;
    return item !== null && typeof item === "object" ? flat(item as object, name) : [[name, item] as [string, unknown]];
  });
}

function figuresTab(figures: Figures, of: string): Node[] {
  const time = (name: string, key: keyof Figures): Cell[] => [name, [duration(figures[key] as number), figures[key] as number]];
  const share = (name: string, value: number | null): Cell[] => [name, [percent(value), value]];
  const keyed = (element: HTMLElement, id: string): HTMLElement => Object.assign(element, { id });
  const tables = [
    keyed(table(`Time${of}`, ["", ""], [
      time("duration", "duration_ns"),
      time("forward", "forward_ns"),
      time("backward", "backward_ns"),
      time("recompute", "recompute_ns"),
      time("stalls", "stall_ns"),
      ...(figures.communication_ns ? [time("collectives", "communication_ns")] : []),
      share("added by both", figures.added_percent),
      share("copies hidden", figures.overlap_percent),
      share("prefetch hits", figures.prefetch.hit_percent),
    ]), "figures-time"),
    keyed(table("Lanes", ["lane", "moved", "rate", "of link", "queue"], figures.lanes.map((lane) => [
      lane.lane,
      [bytes(lane.nbytes), lane.nbytes],
      [rate(lane.bytes_per_s), lane.bytes_per_s],
      [lane.bytes_per_s && lane.link_bytes_per_s ? percent((100 * lane.bytes_per_s) / lane.link_bytes_per_s) : "–", lane.link_bytes_per_s],
      [bytes(lane.queue_nbytes), lane.queue_nbytes],
    ])), "figures-lanes"),
    keyed(table("Peaks", ["tier", "saved", "all", "budget"], figures.peaks.map((peak) => [
      peak.tier,
      [bytes(peak.saved_nbytes), peak.saved_nbytes],
      [peak.measured_nbytes === null ? "–" : bytes(peak.measured_nbytes), peak.measured_nbytes],
      [peak.budget_nbytes === null ? "–" : bytes(peak.budget_nbytes), peak.budget_nbytes],
    ])), "figures-peaks"),
    keyed(table("Stalls by cause", ["cause", "count", "total", "longest"], figures.stalls.map((stall) => [
      stall.cause,
      [count(stall.count), stall.count],
      [duration(stall.total_ns), stall.total_ns],
      [duration(stall.longest_ns), stall.longest_ns],
    ])), "figures-stalls"),
    keyed(table("Layers that cost most", ["layer", "stalls", "recompute", "moved"], figures.worst_layers.map((cost) => [
      printable(cost.layer),
      [duration(cost.stall_ns), cost.stall_ns],
      [duration(cost.recompute_ns), cost.recompute_ns],
      [bytes(cost.moved_nbytes), cost.moved_nbytes],
    ])), "figures-layers"),
  ];
  return tables.filter((one) => one.querySelector("tbody tr"));
}
