// The page of a search, from the answer in it: the best layouts, the space, and one layout on nodes, in memory and in time.

import { h, table, type Cell } from "../dom";
import { bytes, count, percent, printable } from "../format";
import {
  clusterWords,
  doesWords,
  scheduleWords,
  seconds,
  shapeWords,
  shardingWords,
  shown,
  type Answer,
  type Data,
  type Entry,
} from "./answer";
import { Chart } from "./chart";
import { Cluster } from "./cluster";
import { memoryOf } from "./memory";
import { Steps } from "./pipeline";

const CLOSE = 1e-3; // fraction of a step below which an item's difference is not told

function start(): void {
  const root = document.getElementById("memo");
  const source = document.getElementById("memo-data");
  if (!root || !source) throw new Error("this is not a page that memo wrote");
  const data = JSON.parse(source.textContent ?? "") as Data;
  const answer = data.search;
  const entries = shown(answer, data.drawn);
  const best = bestTable(entries, answer, (number) => choose(number));
  const chart = new Chart(answer, entries, (number) => choose(number));
  const cluster = new Cluster(answer);
  const steps = new Steps();
  const memory = h("div");
  const titles = ["on nodes and links", "memory of a GPU by stage", "one step"].map((words) => ({ words, element: h("h2") }));

  function choose(number: number): void {
    const which = `Number ${number + 1}, ${shapeWords(entries[number])}`;
    for (const { words, element } of titles) element.textContent = `${which}: ${words}`;
    best.querySelectorAll("tbody tr").forEach((row, i) => row.setAttribute("aria-selected", String(i === number)));
    chart.select(number);
    cluster.show(entries[number], data.drawn[number]);
    memory.replaceChildren(memoryOf(data, data.drawn[number].stages));
    steps.show(data.drawn[number], entries[number].accumulate);
  }

  root.append(
    ...headline(answer, entries[0]),
    h("div", { class: "wide", id: "best" }, best),
    h("h2", {}, "The space"),
    h("p", { class: "note" }, "Filled: planned. Hollow: proven slower by this bound, never planned. Squares: with a pipeline. A click shows a layout's figures."),
    chart.element,
    titles[0].element,
    h("p", { class: "note" }, "Colours are stages. A click on a rank shows the ranks that it communicates with."),
    cluster.element,
    titles[1].element,
    memory,
    titles[2].element,
    steps.element,
    h("h2", {}, "Why number 1 wins"),
    ...why(answer),
    h("h2", {}, "Run it"),
    ...launch(answer, data, entries),
  );
  choose(0);
  requestAnimationFrame(() => {
    document.documentElement.dataset["ready"] = "1";
  });
}

function headline(answer: Answer, best: Entry): HTMLElement[] {
  const title = `${printable(answer.model)} at ${count(answer.tokens)} tokens on ${clusterWords(answer)}`;
  const { budgets, proof, space } = answer;
  const tiers = [`${bytes(budgets.device_bytes)} of a GPU`, `${bytes(budgets.host_bytes)} host`, `${bytes(budgets.disk_bytes)} disk of a node`];
  const lead = `${shapeWords(best)}${best.schedule ? `, ${scheduleWords(best)}${best.chunks > 1 ? " chunks" : ""}` : ""}: ${seconds(best.step_s)} a step of ${count(answer.global_batch)} sequences, ${count(Math.round(best.tokens_per_s))} tokens a second.`;
  const searched = `${count(space.candidates)} ways in ${count(space.layouts)} layouts, ${count(proof.planned)} planned in ${seconds(answer.seconds)}; all others are proven slower or do not fit. ${answer.precision}; budgets${answer.groups ? " of the largest" : ""}: ${tiers.join(", ")}.`;
  const assumed = answer.assumed.map((sentence) => h("p", { class: "note" }, `Assumed: ${printable(sentence, 300)}.`));
  return [h("h1", {}, title), h("p", { class: "lead" }, lead), h("p", { class: "note" }, searched), ...assumed];
}

function bestTable(entries: Entry[], answer: Answer, choose: (number: number) => void): HTMLElement {
  const head = ["", "layout", "GPUs", "schedule", "sharding", "microbatch", "step", "simulated", "tokens/s", "mfu_causal", "bubble", "exchange", "memory", "activations"];
  if (answer.groups) head.push("placement");
  const rows = entries.map((one, number): Cell[] => {
    const exchange = one.time_s["communication"] + one.time_s["reduction"];
    return [
      number < answer.best.length ? String(number + 1) : `${number + 1} (memo train)`,
      shapeWords(one),
      [count(one.gpus), one.gpus],
      scheduleWords(one),
      shardingWords(one),
      `${one.batch} × ${one.accumulate}`,
      [seconds(one.step_s), one.step_s],
      [seconds(one.simulated_step_s), one.simulated_step_s],
      [count(Math.round(one.tokens_per_s)), one.tokens_per_s],
      [percent(100 * one.mfu_causal), one.mfu_causal],
      [percent((100 * one.time_s["bubble"]) / one.step_s), one.time_s["bubble"]],
      [percent((100 * exchange) / one.step_s), exchange],
      [bytes(one.memory.peak_bytes), one.memory.peak_bytes],
      doesWords(one),
      ...(answer.groups ? [printable(one.placement ?? "", 300)] : []),
    ];
  });
  return table("", head, rows, choose);
}

function why(answer: Answer): HTMLElement[] {
  const [best, second] = answer.best;
  const items = Object.keys(best.time_s);
  const rows = answer.why.map((rival): Cell[] => {
    const same = second && shapeWords(rival) === shapeWords(second) && rival.schedule === second.schedule && rival.planned;
    return [
      `${same ? "runner-up" : `best of ${rival.family}`}: ${shapeWords(rival)}`,
      [`${rival.planned ? "" : "at least "}+${seconds(rival.slower_s)}`, rival.slower_s],
      ...items.map((item): Cell => {
        const more = rival.time_s[item];
        if (more === undefined || Math.abs(more) < CLOSE * best.step_s) return ["–", more ?? 0];
        return [`${more > 0 ? "+" : "−"}${seconds(Math.abs(more))}`, more];
      }),
      rival.bound ? `${rival.bound} bound` : "",
    ];
  });
  const { pruned, smallest_bound_s: smallest, without_plan: vain } = answer.proof;
  const counts = Object.entries(pruned).filter(([, number]) => number).map(([bound, number]) => `${bound} ${count(number)}`);
  const proof = [
    counts.length ? `Closed by bounds: ${counts.join(", ")} ways.` : "",
    vain ? `Planned in vain: ${count(vain)}.` : "",
    smallest === null ? "" : `Smallest bound of what was not planned: ${seconds(smallest)}.`,
  ];
  const out = Object.entries(answer.space.left_out).map(([reason, number]) => `${reason} (${count(number)})`);
  return [
    rows.length
      ? h("div", { class: "wide", id: "why" }, table("", ["a step of", "takes longer by", ...items, "proven by"], rows))
      : h("p", {}, "Nothing else fits."),
    h("p", { class: "note" }, proof.filter(Boolean).join(" ")),
    ...(out.length ? [h("p", { class: "note" }, `Layouts left out: ${out.join(", ")}.`)] : []),
  ];
}

function launch(answer: Answer, data: Data, entries: Entry[]): HTMLElement[] {
  if (!answer.launch) return [h("p", {}, `No launch line: ${printable(answer.not_trained ?? "memo train shards by ZeRO 3 alone", 300)}.`)];
  const number = data.written === null ? "" : `number ${data.written + 1}, `;
  const written = `The launch lines are of ${number}${shapeWords(answer.written)}${number ? `, in ${seconds(entries[data.written!].step_s)}` : ""}: memo train shards by ZeRO 3 alone, and a plan is written only if the simulator agrees with it.`;
  return [
    ...(data.written === 0 ? [] : [h("p", {}, written)]),
    ...(answer.output === null ? [h("p", {}, "No plan was written; add -o plan.json, then run:")] : []),
    h("pre", { id: "torchrun" }, answer.launch.torchrun),
    ...(answer.launch.slurm === null ? [] : [h("pre", { id: "slurm" }, answer.launch.slurm)]),
  ];
}

start();
