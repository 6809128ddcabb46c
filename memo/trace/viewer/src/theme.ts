// Colours, in both themes. Lanes use the Okabe-Ito palette, which the common kinds of colour blindness tell apart;
// layers use viridis, which is also ordered by lightness; stalls are hatched as well as coloured.

import { interpolateViridis } from "d3-scale-chromatic";

export interface Theme {
  background: string;
  band: string;
  grid: string;
  text: string;
  faint: string;
  accent: string;
  stall: string;
  budget: string;
  plan: string;
  measured: string;
}

const LIGHT: Theme = {
  background: "#ffffff",
  band: "#f4f5f7",
  grid: "#dde0e6",
  text: "#1b1f27",
  faint: "#5b6472",
  accent: "#111111",
  stall: "#d55e00",
  budget: "#c0392b",
  plan: "#1b1f27",
  measured: "#0072b2",
};

const DARK: Theme = {
  background: "#14171c",
  band: "#1d2128",
  grid: "#333943",
  text: "#e6e9ef",
  faint: "#a3acba",
  accent: "#ffffff",
  stall: "#ff7f2a",
  budget: "#ff6b5e",
  plan: "#e6e9ef",
  measured: "#7cc4ff",
};

export function dark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  if (chosen) return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export function theme(): Theme {
  return dark() ? DARK : LIGHT;
}

const LANES: Record<string, string> = {
  compute: "#0072b2",
  recompute: "#cc79a7",
  network: "#808a9a",
  d2h: "#009e73",
  h2d: "#56b4e9",
  "nvme-write": "#b07d12",
  "nvme-read": "#8c7bd0",
};

const PHASES: Record<string, string> = { forward: "#0072b2", backward: "#e69f00", optimizer: "#8a8f98" };

export function laneColour(lane: string, phase: string): string {
  return (lane === "compute" ? PHASES[phase] : undefined) ?? LANES[lane] ?? "#8a8f98";
}

export function stallColour(theme: Theme, lane: string): string {
  return lane === "collectives" ? theme.faint : theme.stall;
}

// Black or white, whichever reads better on the colour.
export function inkOn(colour: string): string {
  const [red, green, blue] = channels(colour);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000000" : "#ffffff";
}

export function channels(colour: string): [number, number, number] {
  if (colour.startsWith("#")) {
    const value = Number.parseInt(colour.slice(1), 16);
    return [value >> 16, (value >> 8) & 255, value & 255];
  }
  const [red, green, blue] = colour.match(/\d+/g) ?? ["0", "0", "0"];
  return [Number(red), Number(green), Number(blue)];
}

// One colour a layer, first to last.
export function layerColour(place: number, layers: number): string {
  return interpolateViridis(layers < 2 ? 0.5 : 0.08 + (0.87 * place) / (layers - 1));
}
