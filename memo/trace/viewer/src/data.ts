// The page's JSON (memo/trace/html_data.py) as typed arrays, and the questions the views ask of them.

export interface Figures {
  rank: number;
  step: number | null;
  start_ns: number;
  complete: boolean;
  duration_ns: number;
  forward_ns: number;
  backward_ns: number;
  compute_ns: number;
  recompute_ns: number;
  stall_ns: number;
  communication_ns: number;
  added_ns: number;
  added_percent: number | null;
  copy_ns: number;
  hidden_ns: number;
  overlap_percent: number | null;
  lanes: LaneFigures[];
  stalls: { cause: string; count: number; total_ns: number; longest_ns: number }[];
  prefetch: { prefetched: number; fetched: number; live: number; late: number; hit_percent: number | null };
  peaks: PeakFigures[];
  worst_layers: { layer: string; stall_ns: number; recompute_ns: number; moved_nbytes: number }[];
  verdict: { rule: string; text: string }[];
}

export interface LaneFigures {
  lane: string;
  copies: number;
  nbytes: number;
  busy_ns: number;
  hidden_ns: number;
  forward_busy_percent: number | null;
  backward_busy_percent: number | null;
  bytes_per_s: number | null;
  queue_nbytes: number;
  link_bytes_per_s: number | null;
}

export interface PeakFigures {
  tier: string;
  saved_nbytes: number;
  at_ns: number;
  measured_nbytes: number | null;
  budget_nbytes: number | null;
  predicted_nbytes: number | null;
}

export interface RankFigures {
  rank: number;
  world_size: number;
  path: string;
  events: number;
  dropped_events: number;
  remarks: string[];
  total: Figures;
  steps: Figures[];
}

interface RawRow {
  lane: number;
  row: number;
  t: number[];
  d: number[];
  phase: number[];
  name: number[];
  nbytes: number[];
  life: number[];
  merged: number[];
}

interface RawRank {
  rank: number;
  shift_ns: number;
  thinned: string | null;
  rows: RawRow[];
  lives: Record<
    | "id" | "step" | "name" | "nbytes" | "shape" | "op" | "line" | "tier" | "start" | "end" | "states" | "state_t" | "state_to"
    | "state_tier" | "uses" | "use_t" | "use_how",
    number[]
  >;
  stalls: Record<"t" | "d" | "step" | "cause" | "name" | "life", number[]>;
  tiers: Record<"t" | "layer" | "delta" | "below" | "above" | "counter_t" | "counter_nbytes", number[]>[];
  queues: { lane: number; t: number[]; nbytes: number[] }[];
  owned: Record<"band" | "name" | "nbytes" | "shape", number[]>;
  notes: { t: number; step: number; cause: string; message: string }[];
}

export interface PlanBuffer {
  name: string;
  offset: number;
  nbytes: number;
  start: number;
  end: number;
}

export interface Packing {
  title: string;
  arena: string;
  status: string;
  unit: string;
  peak_nbytes: number;
  lower_bound_nbytes: number | null;
  capacity_nbytes: number | null;
  thinned: string | null;
  buffers: PlanBuffer[];
}

export interface RawPage {
  lanes: string[];
  phases: string[];
  causes: string[];
  states: string[];
  tiers: string[];
  uses: string[];
  meta: Record<string, unknown>;
  stats: { rank: number; step: number | null; ranks: RankFigures[] };
  ranks: RawRank[];
  names: string[];
}

// Spans of one lane that do not overlap; `life` is -1 where no tensor is known.
export interface Row {
  lane: number;
  row: number;
  t: Float64Array;
  end: Float64Array;
  phase: Uint8Array;
  name: Int32Array;
  nbytes: Float64Array;
  life: Int32Array;
  merged: Int32Array | null;
}

// Bytes of a lane whose copies were issued and had not ended, from each time on.
export interface Queue {
  t: Float64Array;
  nbytes: number[];
  most: number;
}

export interface Lives {
  length: number;
  id: number[];
  step: number[];
  name: Int32Array;
  nbytes: Float64Array;
  shape: Int32Array;
  op: number[]; // names; 0 where unknown
  line: number[];
  tier: Uint8Array;
  start: Float64Array;
  end: Float64Array;
  stateAt: Int32Array; // life i has the states stateAt[i] .. stateAt[i + 1]
  stateT: Float64Array;
  stateTo: Uint8Array;
  stateTier: Int8Array;
  useAt: Int32Array;
  useT: Float64Array;
  useHow: Uint8Array;
}

export interface Stalls {
  length: number;
  t: Float64Array;
  d: Float64Array;
  step: number[];
  cause: Uint8Array;
  name: Int32Array;
  life: Int32Array;
}

export class Rank {
  readonly rank: number;
  readonly shift: number;
  readonly thinned: string | null;
  readonly rows: Row[];
  readonly lives: Lives;
  readonly stalls: Stalls;
  readonly tiers: TierSeries[];
  readonly without: (band: string) => TierSeries[]; // the tiers again, but for one band
  readonly queues: Map<number, Queue>; // by lane
  readonly owned: RawRank["owned"]; // the largest weights, gradients and tensors of optimizer state
  readonly notes: RawRank["notes"];

  constructor(raw: RawRank, readonly figures: RankFigures, names: string[]) {
    this.rank = raw.rank;
    this.shift = raw.shift_ns;
    this.thinned = raw.thinned;
    this.rows = raw.rows.map(rowOf);
    this.lives = livesOf(raw.lives);
    this.stalls = stallsOf(raw.stalls);
    this.without = (band) => raw.tiers.map((tier) => new TierSeries(tier, names, tier.below.find((name) => names[name] === band)));
    this.tiers = this.without("");
    this.queues = new Map(raw.queues.map(({ lane, t, nbytes }) => [lane, { t: sums(t), nbytes, most: nbytes.reduce((a, b) => Math.max(a, b), 0) }]));
    this.owned = raw.owned;
    this.notes = raw.notes;
  }

  // A step's figures, or (null) the whole trace's.
  step(step: number | null): Figures {
    return this.figures.steps.find((one) => one.step === step) ?? this.figures.total;
  }

  // A step's interval on the common axis.
  interval(step: number | null): [number, number] {
    const { start_ns, duration_ns } = this.step(step);
    return [start_ns + this.shift, start_ns + this.shift + Math.max(duration_ns, 1)];
  }

  // True where a search found the tensor: by its module, operation, shape or Python line.
  found(hits: Uint8Array, life: number): boolean {
    const { name, op, shape, line } = this.lives;
    return hits[name[life]] + hits[op[life]] + hits[shape[life]] + hits[line[life]] > 0;
  }

  // Every copy of a tensor, by start, as [row, index].
  copiesOf(life: number): [Row, number][] {
    const found: [Row, number][] = [];
    for (const row of this.rows) {
      for (let i = row.life.indexOf(life); i >= 0; i = row.life.indexOf(life, i + 1)) found.push([row, i]);
    }
    return found.sort((a, b) => a[0].t[a[1]] - b[0].t[b[1]]);
  }
}

const EVERY = 256; // changes between two snapshots

// Bytes in one tier: every change, their running total, and snapshots by band to start drawing from. The bands are the
// layers, with what they saved; on the device also weights, gradients, optimizer state and the rest, below and above them.
export class TierSeries {
  readonly t: Float64Array;
  readonly layer: Int32Array; // index into `layers`
  readonly delta: Float64Array;
  readonly total: Float64Array;
  readonly layers: number[]; // names of bands from the bottom up: `below`, the layers in order, `above`
  readonly below: number;
  readonly above: number;
  readonly counterT: Float64Array;
  readonly counterBytes: Float64Array;
  readonly peak: number;
  private readonly snapshots: Float64Array;

  // Without the bytes of a `hidden` band, if there is one.
  constructor(raw: RawRank["tiers"][number], names: string[], readonly hidden?: number) {
    this.t = sums(raw.t);
    this.delta = Float64Array.from(raw.delta, (nbytes, i) => (raw.layer[i] === hidden ? 0 : nbytes));
    const collator = new Intl.Collator("en", { numeric: true });
    const others = new Set([...raw.below, ...raw.above]);
    const layers = [...new Set(raw.layer)].filter((name) => !others.has(name));
    layers.sort((a, b) => collator.compare(names[a], names[b]));
    this.layers = [...raw.below, ...layers, ...raw.above];
    this.below = raw.below.length;
    this.above = raw.above.length;
    const place = new Map(this.layers.map((name, index) => [name, index]));
    this.layer = Int32Array.from(raw.layer, (name) => place.get(name) ?? 0);
    this.total = this.delta.slice();
    for (let i = 1; i < this.total.length; i++) this.total[i] += this.total[i - 1];
    this.peak = this.total.reduce((a, b) => Math.max(a, b), 0);
    this.counterT = sums(raw.counter_t);
    this.counterBytes = Float64Array.from(raw.counter_nbytes);
    this.snapshots = this.takeSnapshots();
  }

  // The layers alone.
  get saved(): number[] {
    return this.layers.slice(this.below, this.layers.length - this.above);
  }

  // True where the tier holds nothing within [from, to].
  isEmpty(from: number, to: number): boolean {
    const counted = this.counterBytes.some((nbytes, i) => nbytes > 0 && from <= this.counterT[i] && this.counterT[i] <= to);
    return !counted && this.peakWithin(from, to).nbytes === 0;
  }

  // True where the bands are all that the tier holds, and not only what layers saved.
  get whole(): boolean {
    return this.below + this.above > 0;
  }

  // The instant of the largest total within [from, to], and that total.
  peakWithin(from: number, to: number): { t: number; nbytes: number } {
    const first = above(this.t, from);
    let best = { t: from, nbytes: first ? this.total[first - 1] : 0 };
    for (let i = first; i < this.t.length && this.t[i] <= to; i++) {
      const settled = i + 1 === this.t.length || this.t[i + 1] > this.t[i];
      if (settled && this.total[i] > best.nbytes) best = { t: this.t[i], nbytes: this.total[i] };
    }
    return best;
  }

  // Bytes by layer after the changes [0, index) into `held`.
  before(index: number, held: Float64Array): void {
    const width = this.layers.length;
    const snapshot = Math.floor(index / EVERY);
    held.set(this.snapshots.subarray(snapshot * width, (snapshot + 1) * width));
    for (let i = snapshot * EVERY; i < index; i++) held[this.layer[i]] += this.delta[i];
  }

  private takeSnapshots(): Float64Array {
    const width = this.layers.length;
    const held = new Float64Array(width);
    const taken = new Float64Array((Math.floor(this.t.length / EVERY) + 1) * width);
    for (let i = 0; i <= this.t.length; i++) {
      if (i % EVERY === 0) taken.set(held, (i / EVERY) * width);
      if (i < this.t.length) held[this.layer[i]] += this.delta[i];
    }
    return taken;
  }
}

const SHORTEST_NS = 1000; // a trace without events still has an axis

export class Page {
  readonly ranks: Rank[];
  readonly begin: number;
  readonly end: number;
  readonly layers: Map<number, number>; // the place of each layer (by its name), the same in every rank and tier
  private readonly places = new Map<number, number | undefined>();
  private named: Map<string, number> | null = null;

  constructor(readonly raw: RawPage) {
    this.ranks = raw.ranks.map((rank) => {
      const figures = raw.stats.ranks.find((one) => one.rank === rank.rank);
      if (!figures) throw new Error(`rank ${rank.rank} has no figures`);
      return new Rank(rank, figures, raw.names);
    });
    const intervals = this.ranks.map((rank) => rank.interval(null));
    this.begin = Math.min(...intervals.map(([begin]) => begin));
    this.end = Math.max(this.begin + SHORTEST_NS, ...intervals.map(([, end]) => end));
    this.layers = layersOf(this.ranks, raw.names);
  }

  // The lane in which a stall is drawn: waits for collectives are no stalls of copies.
  stallLane(cause: number): "stalls" | "collectives" {
    return this.raw.causes[cause] === "collective" ? "collectives" : "stalls";
  }

  // The place of the layer that a module is in (or is), in `layers`; undefined for a module of no layer.
  layerPlace(name: number): number | undefined {
    if (!this.places.has(name)) {
      const parts = this.raw.names[name].split(".");
      const wanted = parts.map((_, i) => parts.slice(0, parts.length - i).join(".")); // the module, then what holds it
      const found = wanted.map((one) => this.byName().get(one)).find((place) => place !== undefined);
      this.places.set(name, found);
    }
    return this.places.get(name);
  }

  private byName(): Map<string, number> {
    this.named ??= new Map([...this.layers].map(([name, place]) => [this.raw.names[name], place]));
    return this.named;
  }

  name(index: number): string {
    return this.raw.names[index];
  }
}

function layersOf(ranks: Rank[], names: string[]): Map<number, number> {
  const collator = new Intl.Collator("en", { numeric: true });
  const found = new Set<number>();
  for (const rank of ranks) for (const tier of rank.tiers) for (const name of tier.saved) found.add(name);
  const sorted = [...found].sort((a, b) => collator.compare(names[a], names[b]));
  return new Map(sorted.map((name, place) => [name, place]));
}

// The first index in [0, sorted.length] whose value is above `value`.
export function above(sorted: Float64Array, value: number): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function sums(differences: number[]): Float64Array {
  const values = new Float64Array(differences.length);
  let value = 0;
  for (let i = 0; i < differences.length; i++) values[i] = value += differences[i];
  return values;
}

function offsets(counts: number[]): Int32Array {
  const values = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) values[i + 1] = values[i] + counts[i];
  return values;
}

function rowOf(raw: RawRow): Row {
  const t = sums(raw.t);
  return {
    lane: raw.lane,
    row: raw.row,
    t,
    end: t.map((start, i) => start + raw.d[i]),
    phase: Uint8Array.from(raw.phase),
    name: Int32Array.from(raw.name),
    nbytes: Float64Array.from(raw.nbytes),
    life: Int32Array.from(raw.life),
    merged: raw.merged.length ? Int32Array.from(raw.merged) : null,
  };
}

function livesOf(raw: RawRank["lives"]): Lives {
  return {
    length: raw.id.length,
    id: raw.id,
    step: raw.step,
    name: Int32Array.from(raw.name),
    nbytes: Float64Array.from(raw.nbytes),
    shape: Int32Array.from(raw.shape),
    op: raw.op,
    line: raw.line,
    tier: Uint8Array.from(raw.tier),
    start: sums(raw.start),
    end: sums(raw.end),
    stateAt: offsets(raw.states),
    stateT: sums(raw.state_t),
    stateTo: Uint8Array.from(raw.state_to),
    stateTier: Int8Array.from(raw.state_tier),
    useAt: offsets(raw.uses),
    useT: sums(raw.use_t),
    useHow: Uint8Array.from(raw.use_how),
  };
}

function stallsOf(raw: RawRank["stalls"]): Stalls {
  return {
    length: raw.t.length,
    t: sums(raw.t),
    d: Float64Array.from(raw.d),
    step: raw.step,
    cause: Uint8Array.from(raw.cause),
    name: Int32Array.from(raw.name),
    life: Int32Array.from(raw.life),
  };
}
