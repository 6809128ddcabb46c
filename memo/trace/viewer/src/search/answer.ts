// The data of the page, and how layouts are called. docs/search.md says what the keys of the answer mean.

import { bytes, count, duration, percent, printable } from "../format";

export interface Shape {
  pp: number;
  dp: number;
  cp: number;
  tp: number;
  ep: number; // of dp, which divide the experts
  gpus: number;
  family: string;
}

export interface Links {
  nvlink_bytes_per_s: number;
  nics_per_node: number;
  nic_bytes_per_s: number;
}

// Nodes that are alike, of a cluster whose nodes are not all.
export interface NodeGroup {
  name: string;
  hardware: string;
  nodes: number;
  gpus_per_node: number;
  links: Links;
}

export interface Connection {
  between: [string, string];
  nics_per_node: number;
  nic_bytes_per_s: number;
  trunk_bytes_per_s: number;
}

export interface Layout extends Shape {
  schedule: string | null;
  chunks: number;
  zero: number | null;
  sharded_over: number | null;
  batch: number;
  accumulate: number;
  placement?: string; // on groups of nodes
}

export interface Entry extends Layout {
  mlp_tiles: number;
  step_s: number;
  simulated_step_s: number;
  tokens_per_s: number;
  mfu_causal: number;
  time_s: Record<string, number>;
  memory: Memory;
  host_bytes: number;
  disk_bytes: number;
  does: { declined: string | null; kept: number; host: number; disk: number; recomputed: number };
}

export interface Memory {
  where: string;
  phase: string | null;
  uses_bytes: Record<string, number>;
  peak_bytes: number;
  budget_bytes: number;
  device_bytes: number;
}

export interface Point extends Shape {
  status: "planned" | "slower" | "does not fit";
  step_s?: number;
  peak_device_bytes?: number;
  bound_s?: number;
  bound: string | null;
  placement?: string;
}

export interface Rival extends Shape, Partial<Omit<Layout, keyof Shape>> {
  planned: boolean;
  slower_s: number;
  time_s: Record<string, number>;
  bound: string | null;
}

export interface Answer {
  model: string;
  tokens: number;
  precision: string;
  global_batch: number;
  hardware: string;
  nodes: number;
  gpus_per_node: number;
  budgets: { device_bytes: number; host_bytes: number; disk_bytes: number };
  links: Links | null; // null where there are groups
  groups?: NodeGroup[];
  connections?: Connection[];
  space: { layouts: number; candidates: number; left_out: Record<string, number> };
  proof: { planned: number; without_plan: number; pruned: Record<string, number>; smallest_bound_s: number | null };
  best: Entry[];
  runs: Entry | null;
  written: Layout;
  why: Rival[];
  launch: { torchrun: string; slurm: string | null } | null;
  not_trained: string | null;
  output: string | null; // the plan's file; null where none was written
  points: Point[];
  assumed: string[];
  seconds: number;
}

export type Kind = "tp" | "cp" | "ep" | "dp" | "pp";

export interface Stage {
  layers: [number, number][];
  memory: Memory;
  seconds: Record<string, number>;
  turns?: string[]; // such as F3 or B3.1: pass, microbatch, chunk
  spans?: number[][]; // start, end (in millionths of the step), turn, and thousandths of recompute, stalls, collectives
}

// Groups of ranks of one kind that communicate; `link` where nodes are not alike.
export interface GroupOf {
  kind: Kind;
  ranks: number;
  nodes: number;
  seconds: number | null;
  link?: { between: [string, string] | null; of: "node" | "GPU"; bytes_per_s: number };
}

export interface Drawing {
  simulated_step_s: number; // of so many microbatches
  microbatches: number;
  groups: GroupOf[];
  nodes: { group: number; ranks: (number | null)[] }[] | null; // null where they are alike
  stages: Stage[];
}

export interface Data {
  search: Answer;
  uses: Record<string, string>;
  written: number | null; // the layout that -o writes, if it is shown
  drawn: Drawing[]; // of each layout of `shown`
}

export const KINDS: Record<Kind, string> = {
  tp: "tensor parallelism",
  cp: "context parallelism",
  ep: "expert parallelism",
  dp: "same weights",
  pp: "pipeline",
};

// The ten best, and behind them the one that memo train runs.
export function shown(answer: Answer, drawn: Drawing[]): Entry[] {
  const entries = [...answer.best];
  if (answer.runs && drawn.length > entries.length) entries.push(answer.runs);
  return entries;
}

export function seconds(value: number): string {
  return duration(value * 1e9);
}

export function shapeWords(shape: Shape): string {
  const experts = shape.ep > 1 ? ` (ep ${shape.ep})` : "";
  const named = (["pp", "dp", "cp", "tp"] as const).filter((name) => shape[name] > 1);
  const sizes = named.map((name) => `${name} ${shape[name]}${name === "dp" ? experts : ""}`);
  return sizes.join(" × ") || "one GPU";
}

export function scheduleWords(layout: Partial<Layout>): string {
  if (!layout.schedule) return "–";
  return layout.schedule + ((layout.chunks ?? 1) > 1 ? ` × ${layout.chunks}` : "");
}

export function shardingWords(layout: Partial<Layout>): string {
  if (layout.zero === null || layout.zero === undefined) return "–";
  return `ZeRO ${layout.zero}` + (layout.sharded_over ? ` by ${layout.sharded_over}` : "");
}

export function doesWords(entry: Entry): string {
  const { does } = entry;
  const tiles = entry.mlp_tiles > 1 ? `, MLPs in ${entry.mlp_tiles} tiles` : "";
  if (does.declined) return `keeps all${tiles}`;
  const parts: [string, number][] = [["kept", does.kept], ["host", does.host], ["disk", does.disk], ["again", does.recomputed]];
  return parts.filter(([, part]) => part >= 0.005).map(([name, part]) => `${name} ${percent(100 * part)}`).join(", ") + tiles;
}

// What is said of a layout of which a plan was made.
export function entryFigures(entry: Entry): [string, string][] {
  return [
    ["layout", `${shapeWords(entry)}, on ${entry.gpus} ${entry.gpus > 1 ? "GPUs" : "GPU"}`],
    ["schedule", scheduleWords(entry) + (entry.chunks > 1 ? " chunks" : "")],
    ["sharding", shardingWords(entry)],
    ["microbatches", `${entry.accumulate} of ${entry.batch} ${entry.batch > 1 ? "sequences" : "sequence"}`],
    ["step", `${seconds(entry.step_s)}, simulated ${seconds(entry.simulated_step_s)}`],
    ["tokens", `${count(Math.round(entry.tokens_per_s))} a second, mfu_causal ${percent(100 * entry.mfu_causal)}`],
    ["memory of a GPU", `${bytes(entry.memory.peak_bytes)} of ${bytes(entry.memory.budget_bytes)}`],
    ["of a node", `host ${bytes(entry.host_bytes)}, disk ${bytes(entry.disk_bytes)}`],
    ["activations", doesWords(entry)],
    ...placed(entry),
  ];
}

function placed(of: { placement?: string }): [string, string][] {
  return of.placement ? [["placement", printable(of.placement, 300)]] : [];
}

export function pointFigures(point: Point): [string, string][] {
  const found: [string, string][] = [["layout", `${shapeWords(point)}, on ${point.gpus} ${point.gpus > 1 ? "GPUs" : "GPU"}`]];
  if (point.status === "planned") {
    found.push(["step", seconds(point.step_s!)], ["memory of a GPU", bytes(point.peak_device_bytes!)], ...placed(point));
  } else if (point.status === "slower") {
    found.push(["step", `at least ${seconds(point.bound_s!)}, by the ${point.bound} bound; never planned`]);
  } else found.push(["memory", "no plan fits"]);
  return found;
}

export function clusterWords(answer: Answer): string {
  const words = (nodes: number, gpus: number, hardware: string): string => {
    const each = `${gpus} ${printable(hardware)}`;
    return nodes > 1 ? `${count(nodes)} nodes of ${each}` : each;
  };
  if (answer.groups) return answer.groups.map((one) => words(one.nodes, one.gpus_per_node, one.hardware)).join(" and ");
  return words(answer.nodes, answer.gpus_per_node, answer.hardware);
}
