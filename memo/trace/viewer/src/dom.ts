// Makes elements. Text goes in as text nodes only: no name from a trace is ever parsed as markup.

export type Child = Node | string | null;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// A name that may be broken where its words begin, and within a word only after 24 characters.
export function words(text: string): Node[] {
  const parts = text.split(/(?<=[._/-])(?=[a-z])|(?<=×)|(?<=[a-z])(?=[A-Z][a-z])/).flatMap((part) => part.match(/.{1,24}/gsu) ?? []);
  return parts.flatMap((part, i) => [...(i ? [h("wbr")] : []), document.createTextNode(part)]);
}

// A table with a header row; cells that are pairs are right-aligned numbers: [shown, exact]. `below` is text under a row.
export type Cell = string | Node | [string, number | null];

export function table(caption: string, head: string[], rows: Cell[][], pick?: (row: number) => void, below?: (row: number) => string): HTMLElement {
  const body = rows.flatMap((cells, index) => {
    const line = h("tr", {}, ...cells.map(cell));
    const text = below?.(index);
    const more = text ? [h("tr", { class: "below" }, h("td", { colspan: String(head.length) }, h("div", {}, text)))] : [];
    if (pick) makeButton(line, () => pick(index));
    if (pick) for (const one of more) one.addEventListener("click", () => pick(index));
    return [line, ...more];
  });
  const header = head.map((text) => h("th", { scope: "col" }, text));
  return h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...header)), h("tbody", {}, ...body));
}

function cell(content: Cell): HTMLElement {
  if (Array.isArray(content)) {
    return h("td", { class: "number", "data-value": String(content[1]) }, content[0]);
  }
  return h("td", {}, ...(typeof content === "string" ? words(content) : [content]));
}

function makeButton(line: HTMLElement, act: () => void): void {
  line.tabIndex = 0;
  line.classList.add("pick");
  line.addEventListener("click", act);
  line.addEventListener("keydown", (event) => {
    if (event.key === "Enter") act();
  });
}
