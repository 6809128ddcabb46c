// What the fullest moment of each stage holds on a GPU, by use, against the budget.

import { h, table, type Cell } from "../dom";
import { bytes, percent } from "../format";
import type { Data, Stage } from "./answer";
import { legend } from "./figure";

const COLOURS: Record<string, string> = {
  weights: "#56606f",
  gradients: "#a9745b",
  optimizer: "#8f8578",
  gathered_weights: "#7f9fb5",
  cast_weights: "#b3b9c4",
  embedding: "#e69f00",
  head: "#d55e00",
  saved_tensors: "#0072b2",
  rounding_buffers: "#56b4e9",
  recompute: "#cc79a7",
  transients: "#009e73",
  other: "#c3c8d0",
};

export function memoryOf(data: Data, stages: Stage[]): HTMLElement {
  const uses = Object.keys(data.uses).filter((use) => stages.some((stage) => stage.memory.uses_bytes[use]));
  const whole = Math.max(...stages.map(({ memory }) => Math.max(memory.peak_bytes, memory.budget_bytes)));
  const bars = stages.flatMap(({ memory, layers }, number) => {
    const parts = uses.filter((use) => memory.uses_bytes[use]).map((use) => {
      const part = h("i", { title: `${data.uses[use]}: ${bytes(memory.uses_bytes[use])}`, "data-use": use });
      part.style.width = percentOf(memory.uses_bytes[use], whole);
      part.style.background = COLOURS[use] ?? "#8a8f98";
      return part;
    });
    const budget = h("span", { class: "budget", title: `budget ${bytes(memory.budget_bytes)}` });
    budget.style.left = `calc(${percentOf(memory.budget_bytes, whole)} - 2px)`;
    const share = percent((100 * memory.peak_bytes) / memory.budget_bytes);
    return [h("span", {}, named(number, layers, stages.length)), h("div", { class: "bar" }, ...parts, budget), h("span", {}, `${bytes(memory.peak_bytes)}, ${share}`)];
  });
  const rows = stages.map(({ memory, layers }, number): Cell[] => [
    named(number, layers, stages.length),
    ...uses.map((use): Cell => [bytes(memory.uses_bytes[use] ?? 0), memory.uses_bytes[use] ?? 0]),
    [bytes(memory.peak_bytes), memory.peak_bytes],
    [bytes(memory.budget_bytes), memory.budget_bytes],
    `${memory.where}${memory.phase ? ` ${memory.phase}` : ""}`,
  ]);
  const head = ["", ...uses.map((use) => data.uses[use]), "peak", "budget", "at"];
  return h(
    "div",
    {},
    legend(uses.map((use) => [data.uses[use], COLOURS[use] ?? "#8a8f98"])),
    h("div", { class: "bars" }, ...bars),
    h("details", {}, h("summary", {}, "in numbers"), h("div", { class: "wide", id: "memory" }, table("", head, rows))),
  );
}

export function named(number: number, layers: [number, number][], stages: number): string {
  const words = layers.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`)).join(", ");
  return stages > 1 ? `stage ${number}: layers ${words}` : `layers ${words}`;
}

function percentOf(part: number, whole: number): string {
  return `${(100 * part) / Math.max(whole, 1)}%`;
}
