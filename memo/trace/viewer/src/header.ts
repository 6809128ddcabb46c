// The top of the page: what run this is, which rank and step, the search, and the verdict in words.

import type { Page } from "./data";
import { h } from "./dom";
import { count, duration, printable } from "./format";
import { matches, type Store } from "./state";
import { dark } from "./theme";

export interface Header {
  element: HTMLElement;
  search: HTMLInputElement;
}

export function makeHeader(page: Page, store: Store, act: { next(): void; themed(): void; keys(): void }): Header {
  const search = h("input", { type: "search", id: "search", placeholder: "layer, op, shape", title: "Search by layer, operation, shape or Python line ( / )", "aria-label": "Search by layer, operation, shape or Python line" });
  search.addEventListener("input", () => store.set({ query: search.value, hits: matches(page.raw.names, search.value) }));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") act.next();
  });
  const controls = h("div", { class: "controls" }, rankSelect(page, store), stepSelect(page, store), search, themeButton(act.themed), keysButton(act.keys));
  const title = h("div", { class: "title" }, h("h1", {}, "memo trace"), h("span", { class: "subtitle" }, subtitle(page)));
  const element = h("header", {}, h("div", { class: "bar" }, title, controls), verdict(page, store));
  return { element, search };
}

function subtitle(page: Page): string {
  const { model, hardware } = page.raw.meta;
  const ranks = page.ranks.length;
  return [model, hardware, ranks > 1 ? `${ranks} ranks` : ""]
    .filter((part): part is string => typeof part === "string" && part !== "")
    .map((part) => printable(part, 60))
    .join(" · ");
}

function rankSelect(page: Page, store: Store): HTMLElement | null {
  if (page.ranks.length < 2) return null;
  const select = h("select", { id: "rank", "aria-label": "Rank" });
  for (const [index, rank] of page.ranks.entries()) select.append(h("option", { value: String(index) }, `rank ${rank.rank}`));
  select.append(h("option", { value: "all" }, "all ranks"));
  select.value = String(store.now.rank);
  select.addEventListener("change", () => {
    if (select.value === "all") store.set({ allRanks: true, selection: null });
    else store.set({ allRanks: false, rank: Number(select.value), selection: null });
    select.blur();
  });
  return select;
}

function stepSelect(page: Page, store: Store): HTMLElement {
  const select = h("select", { id: "step", "aria-label": "Step" });
  const fill = (): void => {
    const steps = page.ranks[store.now.rank].figures.steps;
    const options = steps.map((one) => h("option", { value: String(one.step) }, `step ${one.step} · ${duration(one.duration_ns)}`));
    select.replaceChildren(h("option", { value: "" }, `all ${count(steps.length)} steps`), ...options);
    select.value = store.now.step === null ? "" : String(store.now.step);
  };
  fill();
  select.addEventListener("change", () => {
    store.set({ step: select.value === "" ? null : Number(select.value), selection: null });
    select.blur();
  });
  store.watch((change) => {
    if ("rank" in change || "step" in change) fill();
  });
  return select;
}

function themeButton(themed: () => void): HTMLElement {
  const button = h("button", { type: "button", id: "theme", title: "Light or dark", "aria-label": "Switch between light and dark" });
  const label = (): void => {
    button.textContent = dark() ? "Light" : "Dark";
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset["theme"] = dark() ? "light" : "dark";
    label();
    themed();
  });
  label();
  return button;
}

function keysButton(show: () => void): HTMLElement {
  const button = h("button", { type: "button", id: "show-keys", title: "Keys ( ? )", "aria-label": "List the keys" }, "?");
  button.addEventListener("click", show);
  return button;
}

function verdict(page: Page, store: Store): HTMLElement {
  const box = h("div", { class: "verdict", id: "verdict", role: "status" });
  const render = (): void => {
    const rank = page.ranks[store.now.rank];
    const [first, ...rest] = rank.step(store.now.step).verdict;
    const thinned = rank.thinned ? [h("li", { class: "remark" }, rank.thinned)] : [];
    box.replaceChildren(
      h("p", { class: "lead", "data-rule": first?.rule ?? "" }, first?.text ?? "The trace is empty."),
      h("ul", {}, ...rest.map((sentence) => h("li", { "data-rule": sentence.rule }, sentence.text)), ...thinned),
    );
  };
  render();
  store.watch((change) => {
    if ("rank" in change || "step" in change) render();
  });
  return box;
}
