// The view of a layer's recompute, from `memo explain --json`: operator by operator what is kept, moved and repeated, and why.

import type { ExplainedLayer, ExplainedRow, Page } from "./data";
import { h, table, type Cell } from "./dom";
import { bytes, count, percent, printable } from "./format";
import type { Store } from "./state";

export class ExplainView {
  readonly element: HTMLElement;
  private readonly body: HTMLElement;

  constructor(page: Page, private readonly store: Store) {
    this.body = h("div", { class: "body" });
    const { kinds } = page.raw.explained;
    const options = kinds.map((kind, i) => h("option", { value: String(i) }, label(kind)));
    const choice = h("select", { id: "explained", "aria-label": "Kind of layer" }, ...options);
    choice.addEventListener("change", () => this.show(kinds[Number(choice.value)]));
    this.element = h("div", { class: "explain" }, choice, this.body);
    this.show(kinds[0]);
    this.store.watch((change) => {
      if (!("view" in change) || this.store.now.view !== "explain") return;
      const name = selectedName(page, this.store);
      const found = kinds.findIndex((kind) => kind.layers.some((layer) => name === layer || name.startsWith(`${layer}.`)));
      if (found < 0) return;
      choice.value = String(found);
      this.show(kinds[found]);
    });
  }

  private show(kind: ExplainedLayer): void {
    const used = kind.points.find((point) => point.is_used);
    const facts: [string, string][] = [
      ["layers", printable(kind.layers.join(", "))],
      ["setting", printable(kind.setting)],
      ["saved by autograd", `${bytes(kind.saved_nbytes)} in ${count(kind.saved_storages)} storages`],
    ];
    if (used) {
      facts.push(["kept", `${bytes(used.kept_nbytes)}, ${percent(100 * used.kept_fraction)}`]);
      facts.push(["repeated in backward", `${count(used.replayed_steps)} operators, ${time(used.replay_us)}`]);
    }
    if (kind.refused !== null) facts.push(["moved whole", printable(kind.refused)]);
    const rows = kind.rows.filter((row) => row.is_saved || (row.fate !== "view" && row.fate !== "not needed"));
    const points = kind.points.map((point): Cell[] => [
      `${printable(point.name)}${point.is_used ? " (used)" : ""}`,
      [bytes(point.kept_nbytes), point.kept_nbytes],
      [time(point.replay_us), point.replay_us],
      [bytes(point.held_nbytes), point.held_nbytes],
    ]);
    this.body.replaceChildren(
      table(`${printable(kind.layer)} (${printable(kind.module)})`, ["", ""], facts),
      table("Operators, in order; views and what backward does not need are left out", HEAD, rows.map(cells)),
      table("What could be kept instead", ["choice", "kept", "repeated for", "held at once"], points),
    );
  }
}

const HEAD = ["step", "operator", "result", "bytes", "saved", "what becomes of it", "repeated in", "why"];

function cells(row: ExplainedRow): Cell[] {
  return [
    row.step === null ? "before" : String(row.step),
    printable(row.operator),
    `${row.shape.join(" x ") || "scalar"} ${printable(row.dtype)}`,
    [bytes(row.nbytes), row.nbytes],
    row.is_saved ? "yes" : "",
    h("span", { class: `fate-${row.fate}` }, row.fate === "replayed" ? "repeated" : printable(row.fate)),
    row.replay_us === null ? "" : [time(row.replay_us), row.replay_us],
    printable(row.why),
  ];
}

function label(kind: ExplainedLayer): string {
  const more = kind.layers.length > 1 ? ` and ${count(kind.layers.length - 1)} alike` : "";
  return `${printable(kind.layer)} (${printable(kind.module)})${more}`;
}

function time(microseconds: number): string {
  return microseconds < 1000 ? `${microseconds.toFixed(0)} µs` : `${(microseconds / 1000).toFixed(1)} ms`;
}

// Name of the block or tensor that is selected on the timeline: a layer, or a module inside one.
function selectedName(page: Page, store: Store): string {
  const { selection } = store.now;
  if (!selection) return "";
  const rank = page.ranks[selection.rank];
  if (selection.kind === "span") return page.raw.names[rank.rows[selection.row].name[selection.index]];
  return selection.kind === "life" ? page.raw.names[rank.lives.name[selection.life]] : "";
}
