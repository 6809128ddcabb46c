// The page of two runs: one step of each below the other on one scale, and their figures side by side.

import { Page, type RawPage } from "./data";
import { h } from "./dom";
import { duration, printable } from "./format";
import { listenToKeys } from "./keys";
import { Store } from "./state";
import { Timeline } from "./timeline";

export interface RawDiff {
  diff: { sentence: string; names: string[]; rows: { name: string; a: string; b: string; change: string; word: string }[] };
  pages: RawPage[];
}

interface Half {
  timeline: Timeline;
  begin: number; // of the step
  caption: HTMLElement;
}

export function showDiff(root: HTMLElement, raw: RawDiff): void {
  const pages = raw.pages.map((one) => new Page(one));
  const steps = pages.map((page) => page.ranks.find((one) => one.rank === page.raw.stats.rank)!.interval(page.raw.stats.step));
  const longest = Math.max(...steps.map(([begin, end]) => end - begin));
  const halves = pages.map((page, i) => half(page, raw.diff.names[i], "ab"[i], steps[i], longest));
  link(halves);
  const { sentence, rows } = raw.diff;
  const head = ["", "a", "b", "change", ""].map((text) => h("th", { scope: "col" }, text));
  const lines = rows.map(({ name, a, b, change, word }) =>
    h("tr", { class: word }, ...[name, a, b, change, word].map((text, i) => h("td", i ? { class: "number" } : {}, text))),
  );
  const figures = h("table", { id: "figures" }, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...lines));
  const title = h("div", { class: "bar" }, h("div", { class: "title" }, h("h1", {}, "memo trace diff")));
  const lead = h("div", { class: "verdict", id: "verdict" }, h("p", { class: "lead" }, sentence));
  const pair = h("div", { class: "pair" }, ...halves.flatMap(({ caption, timeline }) => [caption, timeline.element]));
  root.append(h("header", {}, title, lead), h("div", { class: "work" }, pair, h("aside", { class: "panel" }, figures)));
  const [first] = halves.map(({ timeline }) => timeline);
  listenToKeys({
    pan: (pixels) => first.axis.pan(pixels),
    zoomBy: (factor) => first.axis.zoomBy(factor, first.pointer),
    once: { "0": () => first.axis.show(steps[0][0], steps[0][0] + longest) },
  });
  const layout = (): void => halves.forEach(({ timeline }) => timeline.layout());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layout);
  layout();
}

function half(page: Page, name: string, letter: string, [begin, end]: [number, number], longest: number): Half {
  const rank = page.ranks.findIndex((one) => one.rank === page.raw.stats.rank);
  const { step } = page.raw.stats;
  const store = new Store({ rank, allRanks: false, step, query: "", hits: null, selection: null, other: true });
  const which = step === null ? "" : `, step ${step}`;
  const caption = h("p", { class: "caption" }, `${letter}: ${printable(name, 80)}${which}, ${duration(end - begin)}`);
  return { timeline: new Timeline(page, store, [begin, begin + longest]), begin, caption };
}

// What one half shows the other shows, too, counted from the beginning of its own step.
function link(halves: Half[]): void {
  for (const { timeline, begin } of halves) {
    timeline.moved = () => {
      const [from, to] = timeline.axis.domain;
      for (const other of halves) {
        const [now, end] = other.timeline.axis.domain.map((t) => t - other.begin + begin);
        const same = Math.abs(now - from) + Math.abs(end - to) < (to - from) * 1e-5; // else both would follow each other
        if (!same) other.timeline.axis.show(from - begin + other.begin, to - begin + other.begin);
      }
    };
  }
}
