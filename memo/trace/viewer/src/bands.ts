// Which rows stand where: the bands of the timeline from top to bottom, and what lies under a point.

import type { Page, Row } from "./data";
import { firstVisible } from "./lanes";
import { LINE, type MemoryChart } from "./memory";
import type { Looking } from "./state";

export const AXIS = 24; // pixels above the first band
const LOWEST = 68; // pixels of a memory chart below its caption
const MAX_ROWS = 4; // of one lane; what overlaps deeper shares the last

export interface Band {
  kind: "title" | "rows" | "stalls" | "memory";
  rank: number;
  y: number;
  height: number;
  text: string;
  rows: Row[];
  chart: MemoryChart | null;
}

export interface Hit {
  band: Band;
  row: Row | null;
  index: number; // of a span or a stall; -1 for none
}

// The bands for a window of some height: lanes of every shown rank, then the memory of the chosen one; of a tier that is
// empty in the chosen step a line that says so.
export function stackBands(page: Page, { allRanks, rank, step }: Looking, charts: MemoryChart[], height: number): Band[] {
  const shown = allRanks ? page.ranks.map((_, i) => i) : [rank];
  const bands: Band[] = [];
  let y = AXIS + 4;
  const add = (band: Omit<Band, "y">): void => {
    bands.push({ ...band, y });
    y += band.height + 3;
  };
  for (const index of shown) {
    const base = { rank: index, rows: [], chart: null };
    if (allRanks) add({ ...base, kind: "title", height: 14, text: `rank ${page.ranks[index].rank}` });
    for (const band of lanesOf(page, index, allRanks ? 13 : 18)) add(band);
  }
  const empty = charts.filter((chart) => chart.series.isEmpty(...page.ranks[rank].interval(step)));
  const left = height - y - 10 - empty.length * (LINE + 6);
  const room = Math.min(240, left / Math.max(charts.length - empty.length, 1) - 6);
  for (const chart of charts) {
    y += 3;
    const shown = empty.includes(chart) ? null : chart;
    const tall = shown ? Math.max(room, shown.header + LOWEST) : LINE;
    add({ kind: "memory", rank, height: tall, text: chart.tier, rows: [], chart: shown });
  }
  return bands;
}

function lanesOf(page: Page, index: number, height: number): Omit<Band, "y">[] {
  const rank = page.ranks[index];
  const bands: Omit<Band, "y">[] = [];
  page.raw.lanes.forEach((lane, place) => {
    const rows = rank.rows.filter((row) => row.lane === place);
    const base = { rank: index, chart: null };
    if (rows.length) {
      const deep = Math.min(rows.length, MAX_ROWS);
      const tall = (lane === "compute" ? height + 6 : height) + (deep - 1) * 7;
      bands.push({ ...base, kind: "rows", height: tall, text: lane, rows });
    }
    const waits = new Set(lane === "compute" ? Array.from(rank.stalls.cause, (cause) => page.stallLane(cause)) : []);
    for (const text of [...waits].sort().reverse()) {
      bands.push({ ...base, kind: "stalls", height: Math.max(12, height - 4), text, rows: [] });
    }
  });
  return bands;
}

// Where the i-th row of a band stands: (y, height), from the top of the band at `y`.
export function slotOf(band: Band, i: number, y: number): [number, number] {
  const deep = Math.min(band.rows.length, MAX_ROWS);
  const tall = band.height / deep;
  return [y + Math.min(i, deep - 1) * tall, Math.max(2, tall - (deep > 1 ? 1 : 0))];
}

// The span or stall of a band at time `t` and height `y`, or the nearest within `near` nanoseconds.
export function hitBand(page: Page, band: Band, t: number, y: number, near: number): Hit {
  const miss = { band, row: null, index: -1 };
  if (band.kind === "stalls") {
    const { stalls } = page.ranks[band.rank];
    let best = -1;
    for (let i = 0; i < stalls.length && stalls.t[i] <= t + near; i++) {
      if (page.stallLane(stalls.cause[i]) !== band.text) continue;
      if (stalls.t[i] + stalls.d[i] >= t - near && (best < 0 || stalls.d[i] > stalls.d[best])) best = i;
    }
    return { ...miss, index: best };
  }
  for (const [i, row] of band.rows.entries()) {
    const [top, height] = slotOf(band, i, band.y);
    if (y < top || y > top + height) continue;
    const index = closest(row, t, near);
    if (index >= 0) return { band, row, index };
  }
  return miss;
}

function closest(row: Row, t: number, near: number): number {
  const first = firstVisible(row, t - near);
  for (let i = first; i < row.t.length && row.t[i] <= t + near; i++) {
    if (row.t[i] <= t && row.end[i] >= t) return i;
  }
  return first < row.t.length && row.t[first] <= t + near ? first : -1;
}
