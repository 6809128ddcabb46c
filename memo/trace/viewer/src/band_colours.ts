// Colours of the memory that no layer saved; told apart from viridis, which layers have, and from each other by lightness.

const COLOURS: Record<string, string> = {
  other: "#c3c8d0",
  "weights, gradients, optimizer": "#56606f",
  weights: "#56606f",
  gradients: "#a9745b",
  "optimizer state": "#8f8578",
  transient: "#eba6b8",
};

export function bandColour(name: string): string {
  return COLOURS[name] ?? "#8a8f98";
}
