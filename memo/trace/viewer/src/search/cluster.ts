// One layout on the cluster: nodes and their GPUs, the groups of a rank, and the links that each group's collectives cross.

import { h, table } from "../dom";
import { count, printable, rate } from "../format";
import { inkOn, layerColour } from "../theme";
import { KINDS, seconds, shardingWords, type Answer, type Connection, type Drawing, type Entry, type GroupOf, type Kind, type NodeGroup } from "./answer";

const MOST_NODES = 16; // drawn one by one; of more, those with the same stages and shards share a card
const MOST_NAMED = 12; // ranks of a group

interface Card {
  nodes: NodeOf[]; // of which the first is drawn
}

// Ranks are numbered as memo train does: stages, then data, context and tensor parallelism, nodes filled in order.
type Place = Record<Exclude<Kind, "ep">, number>;

function place(entry: Entry, rank: number): Place {
  const { tp, cp, dp } = entry;
  return { tp: rank % tp, cp: Math.floor(rank / tp) % cp, dp: Math.floor(rank / (tp * cp)) % dp, pp: Math.floor(rank / (tp * cp * dp)) };
}

// Ranks of a rank's group. Those with the same weights differ in data and context parallelism, beside the context's own.
export function group(entry: Entry, rank: number, kind: Kind): number[] {
  const at = place(entry, rank);
  const { tp, cp, dp, pp, ep } = entry;
  const number = (of: Place): number => ((of.pp * dp + of.dp) * cp + of.cp) * tp + of.tp;
  const sizes = { tp, cp, ep, dp: dp * cp, pp };
  return Array.from({ length: sizes[kind] }, (_, i) => {
    if (kind === "dp") return number({ ...at, dp: Math.floor(i / cp), cp: i % cp });
    return number(kind === "ep" ? { ...at, dp: at.dp - (at.dp % ep) + i } : { ...at, [kind]: i });
  });
}

interface NodeOf {
  group: NodeGroup | null;
  number: number; // within its group
  gpus: (number | null)[]; // ranks; null: idle
}

// Every node with its ranks: those of equal nodes fill one after another.
function nodesOf(answer: Answer, entry: Entry, drawing: Drawing): NodeOf[] {
  if (!drawing.nodes) {
    return Array.from({ length: answer.nodes }, (_, node) => {
      const ranks = Array.from({ length: answer.gpus_per_node }, (_, i) => node * answer.gpus_per_node + i);
      return { group: null, number: node, gpus: ranks.map((rank) => (rank < entry.gpus ? rank : null)) };
    });
  }
  const seen = new Map<number, number>();
  return drawing.nodes.map(({ group, ranks }) => {
    const number = seen.get(group) ?? 0;
    seen.set(group, number + 1);
    return { group: answer.groups![group], number, gpus: ranks };
  });
}

function cards(nodes: NodeOf[], entry: Entry): Card[] {
  const found = new Map<string, Card>();
  nodes.forEach((one, at) => {
    const alike = one.gpus.map((rank) => (rank === null ? "" : (({ tp, pp }) => `${pp}/${tp}`)(place(entry, rank)))).join();
    const key = nodes.length > MOST_NODES ? `${one.group?.name}:${alike}` : String(at);
    const card = found.get(key);
    if (card) card.nodes.push(one);
    else found.set(key, { nodes: [one] });
  });
  return [...found.values()];
}

// Numbers, with runs of neighbours as ranges.
export function ranges(numbers: number[], most = MOST_NAMED): string {
  const parts: string[] = [];
  for (let i = 0; i < numbers.length; ) {
    let j = i;
    while (numbers[j + 1] === numbers[j] + 1) j++;
    parts.push(j > i + 1 ? `${numbers[i]} to ${numbers[j]}` : numbers.slice(i, j + 1).join(", "));
    i = j + 1;
  }
  return parts.length > most ? `${parts.slice(0, most - 1).join(", ")}, … ${parts.at(-1)}` : parts.join(", ");
}

export class Cluster {
  readonly element = h("div");
  private readonly nodes = h("div", { class: "nodes" });
  private readonly words = h("dl", { class: "figures", id: "rank-groups", "aria-live": "polite" });
  private readonly rank = h("input", { type: "number", min: "0", value: "0", id: "rank", "aria-label": "rank" });
  private readonly groups = h("div", { class: "wide groups" });
  private readonly network = h("div", { class: "link", id: "network" });
  private entry!: Entry;
  private all: NodeOf[] = [];
  private cells: { button: HTMLElement; ranks: number[] }[] = [];

  constructor(private readonly answer: Answer) {
    this.rank.addEventListener("input", () => this.pick(Number(this.rank.value)));
    this.element.append(this.nodes, this.network, h("label", {}, "rank ", this.rank), this.words, this.groups);
  }

  show(entry: Entry, drawing: Drawing): void {
    this.entry = entry;
    this.cells = [];
    const { gpus_per_node: size } = this.answer;
    this.all = nodesOf(this.answer, entry, drawing);
    this.nodes.style.setProperty("--columns", String(Math.min(size, 8)));
    this.nodes.style.setProperty("--card", `${Math.min(size, 8) * 34 + 24}px`);
    this.nodes.replaceChildren(...cards(this.all, entry).map((card) => this.card(card)));
    this.network.textContent = this.links(drawing);
    this.rank.max = String(entry.gpus - 1);
    const rows = drawing.groups.map((one) => {
      const { kind, ranks, seconds: time } = one;
      return [
        h("span", {}, h("span", { class: `mark ${kind}` }), `${KINDS[kind]} (${kind === "dp" && entry.cp > 1 ? "dp × cp" : kind})`),
        what(kind, entry),
        kind === "pp" ? `${ranks} stages` : `${ranks} ranks`,
        linkWords(this.answer, one),
        [time === null ? "in the line above" : seconds(time) + (kind === "pp" ? " a message" : " a step"), time] as [string, number | null],
      ];
    });
    const caption = "collectives and the slowest link that they cross; seconds on the network of the busiest rank, hidden or not";
    this.groups.replaceChildren(
      rows.length ? table(caption, ["group", "what", "of", "link", "time"], rows) : h("p", { class: "note" }, "One GPU: nothing is communicated."),
    );
    this.pick(Math.min(Number(this.rank.value) || 0, entry.gpus - 1));
  }

  // What the line between the nodes says: the links, and the groups whose collectives cross them.
  private links(drawing: Drawing): string {
    const { nodes, links, groups, connections } = this.answer;
    if (groups) return [...groups.map(groupWords), ...connections!.map(connectionWords)].join("; ");
    const crossing = (far: boolean): string => {
      const kinds = drawing.groups.filter((one) => one.nodes > 1 === far).map((one) => one.kind);
      return kinds.length ? ` (${kinds.join(", ")})` : "";
    };
    if (!links) return "";
    const within = `within a node ${rate(links.nvlink_bytes_per_s)} a GPU${crossing(false)}`;
    if (nodes < 2) return within;
    const nics = links.nics_per_node ? `${links.nics_per_node} NICs of ${rate(links.nic_bytes_per_s)} a node` : "no network";
    return `${within}; between nodes ${nics}${crossing(true)}`;
  }

  private card({ nodes }: Card): HTMLElement {
    const [{ group: of_group, gpus }] = nodes;
    const numbers = nodes.map((one) => one.number);
    const which = nodes.length > 1 ? `${count(nodes.length)} equal nodes: ${ranges(numbers, 4)}` : `node ${numbers[0]}`;
    const title = of_group ? `${printable(of_group.name)} ${which}, ${printable(of_group.hardware)}` : which;
    const stages = [...new Set(gpus.filter((rank) => rank !== null).map((rank) => place(this.entry, rank).pp))];
    const of = this.entry.pp > 1 && stages.length ? `, ${stages.length > 1 ? "stages" : "stage"} ${ranges(stages, 4)}` : "";
    const cells = gpus.map((rank, i) => {
      if (rank === null) return h("div", { class: "idle", title: "idle" });
      const { pp } = place(this.entry, rank);
      const button = h("button", { type: "button", "aria-label": `rank ${rank}` }, String(rank));
      button.style.background = layerColour(pp, this.entry.pp);
      button.style.color = inkOn(layerColour(pp, this.entry.pp));
      button.addEventListener("click", () => this.pick(rank));
      this.cells.push({ button, ranks: nodes.map((one) => one.gpus[i]!) });
      return button;
    });
    return h("div", { class: "node" }, h("p", {}, title + (stages.length ? of : ", idle")), h("div", { class: "gpus" }, ...cells));
  }

  private pick(rank: number): void {
    const { entry } = this;
    if (!Number.isInteger(rank) || rank < 0 || rank >= entry.gpus) return;
    this.rank.value = String(rank);
    const kinds = (["tp", "cp", "ep", "dp", "pp"] as const).filter((kind) => group(entry, rank, kind).length > 1);
    const groups = kinds.map((kind) => [kind, new Set(group(entry, rank, kind))] as const);
    for (const { button, ranks } of this.cells) {
      const own = groups.find(([, members]) => ranks.some((one) => members.has(one)));
      button.className = ranks.includes(rank) ? "self" : (own?.[0] ?? "far");
    }
    const at = place(entry, rank);
    const node = this.all.find((one) => one.gpus.includes(rank))!;
    const name = (node.group ? `${printable(node.group.name)} ` : "") + `node ${node.number}`;
    const stage = entry.pp > 1 ? `, stage ${at.pp}` : "";
    const rows = [
      ["rank", `${rank}: ${name}, GPU ${node.gpus.indexOf(rank)}${stage}`],
      ...groups.map(([kind, members]) => [KINDS[kind], `${members.size} ranks: ${ranges([...members].sort((a, b) => a - b))}`]),
    ];
    this.words.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }
}

// The slowest link that groups of one kind cross.
function linkWords(answer: Answer, { nodes, link }: GroupOf): string {
  if (link) {
    const between = link.between ? `${printable(link.between[0])} and ${printable(link.between[1])}` : "nodes";
    return link.of === "GPU" ? `within a node, ${rate(link.bytes_per_s)} of a GPU` : `between ${between}, ${rate(link.bytes_per_s)} of a node`;
  }
  const { nics_per_node: nics, nic_bytes_per_s: each, nvlink_bytes_per_s: peers } = answer.links!;
  return nodes > 1 ? `between nodes, ${rate(nics * each)} of a node` : `within a node, ${rate(peers)} of a GPU`;
}

function groupWords({ name, nodes, links }: NodeGroup): string {
  const between = nodes > 1 ? `, between nodes ${links.nics_per_node} NICs of ${rate(links.nic_bytes_per_s)} a node` : "";
  return `${printable(name)}: within a node ${rate(links.nvlink_bytes_per_s)} a GPU${between}`;
}

function connectionWords({ between: [one, other], nics_per_node: nics, nic_bytes_per_s: each, trunk_bytes_per_s: trunk }: Connection): string {
  const all = trunk ? `, ${rate(trunk)} in all` : "";
  return `${printable(one)} to ${printable(other)}: ${nics} ${nics > 1 ? "NICs" : "NIC"} of ${rate(each)} a node${all}`;
}

function what(kind: Kind, entry: Entry): string {
  if (kind === "tp") return "activations of every layer";
  if (kind === "cp") return "heads for tokens around attention";
  if (kind === "ep") return "routed rows to their experts and back";
  if (kind === "pp") return "activations and their gradients, to the next stage and back";
  const sharding = shardingWords(entry);
  return entry.zero === 0 ? "gradients summed" : `weights gathered, gradients reduced (${sharding})`;
}
