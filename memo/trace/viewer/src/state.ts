// What the person is looking at: one object, changed in one place, watched by the views.

export interface Selection {
  kind: "life" | "span" | "stall" | "instant";
  rank: number; // index into page.ranks
  life: number; // -1 for none
  row: number; // of a span: index into rank.rows
  index: number; // of a span or a stall
  t?: number; // of an instant of a tier's memory
  tier?: number;
}

export interface Looking {
  rank: number; // index into page.ranks
  allRanks: boolean;
  step: number | null;
  query: string;
  hits: Uint8Array | null; // by name index: 1 where the query matches; null without a query
  selection: Selection | null;
  other: boolean; // memory that is neither saved nor owned is shown
}

export type Change = Partial<Looking>;

export class Store {
  private readonly watchers: ((change: Change) => void)[] = [];

  constructor(readonly now: Looking) {}

  set(change: Change): void {
    Object.assign(this.now, change);
    for (const watcher of this.watchers) watcher(change);
  }

  watch(watcher: (change: Change) => void): void {
    this.watchers.push(watcher);
  }
}

export function matches(names: string[], query: string): Uint8Array | null {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return null;
  const shape = wanted.replace(/(\d)\s*[x,]\s*(?=\d)/g, "$1×"); // 512x64 and 512, 64 mean a shape
  return Uint8Array.from(names, (name) => (name.toLowerCase().includes(wanted) || name.toLowerCase().includes(shape) ? 1 : 0));
}
