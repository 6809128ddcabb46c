// What the panel says of the selected span, stall or tensor: its life, transition by transition and copy by copy.

import type { Page, Rank } from "./data";
import { h, table, type Cell } from "./dom";
import { bytes, duration, printable, rate } from "./format";
import { holdersTab } from "./holders";
import type { Looking, Selection } from "./state";
import { tensorTable } from "./tensors";

const MEANING: Record<string, string> = {
  live: "saved on the device",
  leaving: "copy out begins",
  away: "source dropped",
  returning: "reload begins",
  back: "on the device again",
  gone: "given back",
};

const FOUND: Record<string, string> = {
  live: "used: still on the device",
  prefetched: "used: reload had begun",
  fetched: "used: reload began only now",
};

export function selectionTab(page: Page, looking: Looking, pick: (selection: Selection) => void): Node[] {
  const { selection } = looking;
  if (!selection) {
    const hint = "Click a block to see it, a copy to see its tensor’s life, the memory to see what holds it; double-click to zoom to it. ? lists the keys.";
    return [h("p", {}, hint)];
  }
  if (selection.kind === "instant") return holdersTab(page, selection, pick);
  const rank = page.ranks[selection.rank];
  const parts: Node[] = [];
  if (selection.kind === "stall") parts.push(stall(page, rank, selection.index));
  if (selection.kind === "span" && selection.life < 0) parts.push(...span(page, rank, selection, pick));
  if (selection.life >= 0) parts.push(...life(page, rank, selection.life));
  return parts;
}

function stall(page: Page, rank: Rank, index: number): HTMLElement {
  const { stalls } = rank;
  const t = stalls.t[index];
  return facts("Stall", [
    ["cause", page.raw.causes[stalls.cause[index]]],
    ["waited", duration(stalls.d[index])],
    ["at", `${((t - page.begin) / 1e9).toFixed(4)} s, step ${stalls.step[index]}`],
    ["module", printable(page.name(stalls.name[index]))],
  ]);
}

function span(page: Page, rank: Rank, selection: Selection, pick: (selection: Selection) => void): Node[] {
  const row = rank.rows[selection.row];
  const i = selection.index;
  const module = page.name(row.name[i]);
  const merged = row.merged && row.merged[i] > 1 ? `${row.merged[i]} spans, merged` : "";
  const shown = facts("Span", [
    ["module", merged || printable(module)],
    ["lane", page.raw.lanes[row.lane]],
    ["phase", page.raw.phases[row.phase[i]]],
    ["began", `${((row.t[i] - page.begin) / 1e9).toFixed(4)} s`],
    ["took", duration(row.end[i] - row.t[i])],
  ]);
  const { lives } = rank;
  const own = [...Array(lives.length).keys()]
    .filter((one) => module && isWithin(page.name(lives.name[one]), module) && lives.start[one] <= row.end[i] && lives.end[one] >= row.t[i])
    .sort((a, b) => lives.nbytes[b] - lives.nbytes[a])
    .slice(0, 50);
  if (!own.length) return [shown];
  const choose = (life: number): void => pick({ kind: "life", rank: selection.rank, life, row: -1, index: -1 });
  return [shown, tensorTable(page, rank, "Its saved tensors", own, choose)];
}

function isWithin(name: string, module: string): boolean {
  return name === module || name.startsWith(`${module}.`);
}

function life(page: Page, rank: Rank, one: number): Node[] {
  const { lives } = rank;
  const parts: Node[] = [
    facts("Tensor", [
      ["module", printable(page.name(lives.name[one])) || "not in the trace"],
      ["bytes", bytes(lives.nbytes[one])],
      ["shape", printable(page.name(lives.shape[one])) || "–"],
      ["operation", printable(page.name(lives.op[one]))],
      ["saved by", printable(page.name(lives.line[one]), 240)],
      ["went to", page.raw.tiers[lives.tier[one]]],
      ["step", String(lives.step[one])],
      ["id", String(lives.id[one])],
      ["lived", duration(lives.end[one] - lives.start[one])],
    ]),
  ];
  const copies = rank.copiesOf(one).map(([row, i]): Cell[] => [
    page.raw.lanes[row.lane],
    [duration(row.end[i] - row.t[i]), row.end[i] - row.t[i]],
    [rate((row.nbytes[i] / Math.max(row.end[i] - row.t[i], 1)) * 1e9), row.nbytes[i]],
  ]);
  parts.push(table("Its life", ["at", "", "after"], story(page, rank, one)));
  if (copies.length) parts.push(table("Its copies", ["lane", "took", "rate"], copies));
  return parts;
}

function story(page: Page, rank: Rank, one: number): Cell[][] {
  const { lives } = rank;
  const moments: [number, string][] = [];
  for (let i = lives.stateAt[one]; i < lives.stateAt[one + 1]; i++) {
    const to = page.raw.states[lives.stateTo[i]];
    const tier = lives.stateTier[i] >= 0 ? page.raw.tiers[lives.stateTier[i]] : "";
    const where = tier && tier !== "device" && to !== "gone" ? ` (${tier})` : "";
    moments.push([lives.stateT[i], `${MEANING[to]}${where}`]);
  }
  for (let i = lives.useAt[one]; i < lives.useAt[one + 1]; i++) {
    moments.push([lives.useT[i], FOUND[page.raw.uses[lives.useHow[i]]]]);
  }
  moments.sort((a, b) => a[0] - b[0]);
  return moments.map(([t, text], i) => [
    [`${((t - page.begin) / 1e9).toFixed(4)} s`, t],
    text,
    [i ? `+${duration(t - moments[i - 1][0])}` : "", i ? t - moments[i - 1][0] : null],
  ]);
}

function facts(title: string, rows: [string, string][]): HTMLElement {
  return table(title, ["", ""], rows.filter(([, value]) => value));
}
