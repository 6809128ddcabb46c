// Puts the page together: data in, one store, header and views around it.

import { Page, type Packing, type RawPage } from "./data";
import { showDiff, type RawDiff } from "./diff";
import { h } from "./dom";
import { makeHeader } from "./header";
import { keysDialog, listenToKeys } from "./keys";
import { Overview } from "./overview";
import { showPacking } from "./packing";
import { Panel } from "./panel";
import { Store } from "./state";
import { Timeline } from "./timeline";

function start(): void {
  const root = document.getElementById("memo");
  const source = document.getElementById("memo-data");
  if (!root || !source) throw new Error("this is not a page that memo wrote");
  const raw = JSON.parse(source.textContent ?? "") as RawPage | RawDiff | { plans: Packing[] };
  source.remove();
  if ("diff" in raw) showDiff(root, raw);
  else if ("plans" in raw) showPacking(root, raw.plans);
  else show(root, raw);
  requestAnimationFrame(() => {
    document.documentElement.dataset["ready"] = String(Math.round(performance.now()));
  });
}

function show(root: HTMLElement, raw: RawPage): void {
  const page = new Page(raw);
  const store = new Store({
    rank: Math.max(0, page.ranks.findIndex((rank) => rank.rank === page.raw.stats.rank)),
    allRanks: false,
    step: page.raw.stats.step,
    query: "",
    hits: null,
    selection: null,
    other: true,
  });
  const timeline = new Timeline(page, store);
  const overview = new Overview(page, store, timeline.axis);
  timeline.moved = () => overview.draw();
  const panel = new Panel(page, store, { show: (from, to) => timeline.axis.show(from, to) });
  const next = nextMatch(page, store, timeline);
  const keys = keysDialog();
  const header = makeHeader(page, store, {
    next,
    keys: () => keys.showModal(),
    themed: () => timeline.layout(),
  });
  const first = h("div", { class: "work" }, h("div", { class: "lanes" }, overview.element, timeline.element), panel.element);
  root.append(keys, header.element, first);

  const toStep = (): void => timeline.axis.around(...page.ranks[store.now.rank].interval(store.now.step), 0.01);
  store.watch((change) => {
    if ("step" in change) toStep();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timeline.layout());
  listenToKeys({
    pan: (pixels) => timeline.axis.pan(pixels),
    zoomBy: (factor) => timeline.axis.zoomBy(factor, timeline.pointer),
    once: {
      "0": () => timeline.axis.show(page.begin, page.end),
      f: () => focus(page, store, timeline),
      "?": () => keys.showModal(),
      o: () => store.set({ other: !store.now.other }),
      "/": () => header.search.focus(),
      "[": () => moveStep(page, store, -1),
      "]": () => moveStep(page, store, 1),
      escape: () => {
        header.search.value = "";
        store.set({ selection: null, query: "", hits: null });
      },
    },
  });
  timeline.layout();
  toStep();
}

function focus(page: Page, store: Store, timeline: Timeline): void {
  const { selection } = store.now;
  if (!selection || selection.kind === "instant") return;
  const rank = page.ranks[selection.rank];
  if (selection.kind === "span") {
    const row = rank.rows[selection.row];
    timeline.axis.around(row.t[selection.index], row.end[selection.index]);
  } else if (selection.kind === "stall") {
    const { t, d } = rank.stalls;
    timeline.axis.around(t[selection.index], t[selection.index] + d[selection.index]);
  } else {
    timeline.axis.around(rank.lives.start[selection.life], rank.lives.end[selection.life], 0.1);
  }
}

function moveStep(page: Page, store: Store, by: number): void {
  const steps = page.ranks[store.now.rank].figures.steps.map((one) => one.step);
  if (!steps.length) return;
  const at = steps.indexOf(store.now.step);
  store.set({ step: steps[Math.max(0, Math.min(steps.length - 1, (at < 0 ? 0 : at + by)))], selection: null });
}

// Enter in the search: selects the tensors that match one after another, in order of time.
function nextMatch(page: Page, store: Store, timeline: Timeline): () => void {
  return () => {
    const { hits, rank: index, step, selection } = store.now;
    if (hits === null) return;
    const { lives } = page.ranks[index];
    const from = selection?.life ?? -1;
    for (let passed = 1; passed <= lives.length; passed++) {
      const life = (from + passed + lives.length) % lives.length;
      if (!page.ranks[index].found(hits, life) || (step !== null && lives.step[life] !== step)) continue;
      store.set({ selection: { kind: "life", rank: index, life, row: -1, index: -1 } });
      timeline.axis.around(lives.start[life], lives.end[life], 0.1);
      return;
    }
  };
}

start();
