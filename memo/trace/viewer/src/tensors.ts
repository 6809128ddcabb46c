// The list of saved tensors: what made each one, its shape and size, and where it went; a column that no tensor has is left out.

import type { Page, Rank } from "./data";
import { h, table, words, type Cell } from "./dom";
import { bytes, duration, printable } from "./format";

export function tensorTable(page: Page, rank: Rank, caption: string, chosen: number[], pick: (life: number) => void): HTMLElement {
  const { lives } = rank;
  const text = (names: ArrayLike<number>) => (life: number): string => printable(page.name(names[life]));
  const columns: [string, (life: number) => Cell][] = [["module", text(lives.name)]];
  if (lives.shape.some((name) => name > 0)) columns.unshift(["shape", (life) => h("span", { class: "shape" }, ...words(text(lives.shape)(life)))]);
  if (lives.op.some((name) => name > 0)) columns.unshift(["operation", text(lives.op)]);
  columns.push(
    ["bytes", (life) => [bytes(lives.nbytes[life]), lives.nbytes[life]]],
    ["lived", (life) => [duration(lives.end[life] - lives.start[life]), lives.end[life] - lives.start[life]]],
    ["tier", (life) => page.raw.tiers[lives.tier[life]]],
  );
  const rows = chosen.map((life) => columns.map(([, cell]) => cell(life)));
  const line = (row: number): string => printable(page.name(lives.line[chosen[row]]), 240);
  return table(caption, columns.map(([name]) => name), rows, (row) => pick(chosen[row]), line);
}
