// What held a tier's memory at one instant: the ten largest tensors, and the bytes that no tensor of the trace accounts for.

import { above, type Lives, type Page, type Rank } from "./data";
import { h, table, type Cell } from "./dom";
import { bytes, printable } from "./format";
import type { Selection } from "./state";

const MOST = 10;

interface Holder {
  nbytes: number;
  what: string; // operation, or the band of what is not saved
  name: string; // layer or parameter
  shape: string;
  line: string;
  life: number; // -1: not a saved tensor
}

export function holdersTab(page: Page, selection: Selection, pick: (selection: Selection) => void): Node[] {
  const rank = page.ranks[selection.rank];
  const [t, tier] = [selection.t ?? 0, selection.tier ?? 0];
  const series = rank.tiers[tier];
  const changes = above(series.t, t);
  const total = changes ? series.total[changes - 1] : 0;
  const step = rank.figures.steps.find((one) => rank.interval(one.step)[0] <= t && t <= rank.interval(one.step)[1]);
  const found = [...savedAt(page, rank, tier, t), ...othersAt(page, rank, tier, changes)];
  const shown = found.sort((a, b) => b.nbytes - a.nbytes).slice(0, MOST);
  const name = page.raw.tiers[tier] === "disk" ? "disk" : `${page.raw.tiers[tier]} memory`;
  const where = `${((t - page.begin) / 1e9).toFixed(4)} s${step ? `, step ${step.step}` : ""}`;
  const rows = shown.map((one): Cell[] => [
    [bytes(one.nbytes), one.nbytes],
    h("div", {}, ...lines(one).map((text) => h("div", {}, text))),
  ]);
  const choose = (row: number): void => {
    if (shown[row].life >= 0) pick({ kind: "life", rank: selection.rank, life: shown[row].life, row: -1, index: -1 });
  };
  const title = `Largest holders of ${bytes(total)} of ${name} at ${where}`;
  const holders = Object.assign(table(title, ["bytes", "operation, layer, shape"], rows, choose), { id: "holders" });
  const left = found.length - shown.length;
  const rest = total - shown.reduce((sum, one) => sum + one.nbytes, 0);
  return left > 0 ? [holders, h("p", {}, `${left} smaller ones hold ${bytes(rest)}.`)] : [holders];
}

function lines(one: Holder): string[] {
  const place = one.name ? `${one.what}, ${printable(one.name)}` : one.what;
  return [place, one.shape, printable(one.line, 240)].filter((text) => text);
}

function savedAt(page: Page, rank: Rank, tier: number, t: number): Holder[] {
  const { lives } = rank;
  const found: Holder[] = [];
  for (let life = 0; life < lives.length; life++) {
    if (lives.start[life] > t || lives.end[life] < t || !holds(page, lives, life, tier, t)) continue;
    found.push({
      nbytes: lives.nbytes[life],
      what: printable(page.name(lives.op[life])) || "saved",
      name: page.name(lives.name[life]),
      shape: printable(page.name(lives.shape[life])),
      line: page.name(lives.line[life]),
      life,
    });
  }
  return found;
}

// Whether a storage has bytes in a tier at `t`: the table of memo/trace/tensor_lifetimes.py.
function holds(page: Page, lives: Lives, life: number, tier: number, t: number): boolean {
  let [state, lower] = ["", -1];
  for (let i = lives.stateAt[life]; i < lives.stateAt[life + 1] && lives.stateT[i] <= t; i++) {
    state = page.raw.states[lives.stateTo[i]];
    if (state === "live" || state === "gone") lower = -1;
    else if (lives.stateTier[i] > 0) lower = lives.stateTier[i];
  }
  if (page.raw.tiers[tier] !== "device") return lower === tier;
  return state !== "" && state !== "away" && state !== "gone";
}

// Bands that no layer saved: their named tensors, and the rest of each as one.
function othersAt(page: Page, rank: Rank, tier: number, changes: number): Holder[] {
  const series = rank.tiers[tier];
  const held = new Float64Array(series.layers.length);
  series.before(changes, held);
  const found: Holder[] = [];
  series.layers.forEach((band, place) => {
    if (place >= series.below && place < series.layers.length - series.above) return;
    let rest = held[place];
    rank.owned.band.forEach((owner, i) => {
      const nbytes = rank.owned.nbytes[i];
      if (owner !== band || nbytes > rest) return;
      rest -= nbytes;
      const [name, shape] = [page.name(rank.owned.name[i]), printable(page.name(rank.owned.shape[i]))];
      found.push({ nbytes, what: page.name(band), name, shape, line: "", life: -1 });
    });
    const name = rest < held[place] ? "smaller tensors" : "";
    if (rest > 0) found.push({ nbytes: rest, what: page.name(band), name, shape: "", line: "", life: -1 });
  });
  return found;
}
