// The page of a running job: asks its server once a second, and shows each new step in place of the one before.

import type { Page, RawPage } from "./data";
import { h } from "./dom";
import type { Shown } from "./main";
import { matches, type Looking } from "./state";

const EVERY_MS = 1000;

interface Answer {
  version: number;
  status: string;
  page: RawPage | null;
}

type Show = (root: HTMLElement, raw: RawPage, kept?: (page: Page) => Partial<Looking>) => Shown;

export function follow(root: HTMLElement, show: Show): void {
  const status = h("p", { class: "live", id: "live", role: "status" }, "waiting for the server");
  root.before(status);
  let version = 0;
  let shown: Shown | null = null;

  const ask = async (): Promise<void> => {
    try {
      const reply = await fetch(`data?after=${version}`, { cache: "no-store" });
      if (reply.status === 200) {
        const answer = (await reply.json()) as Answer;
        version = answer.version;
        status.textContent = answer.status;
        if (answer.page) shown = replace(root, show, shown, answer.page);
      }
    } catch {
      status.textContent = "the server has stopped; this is the newest step it sent";
      version = 0;
    }
    setTimeout(() => void ask(), EVERY_MS);
  };
  void ask();
}

// The newest step in place of the newest one before, at the same zoom; an older step that was chosen stays.
function replace(root: HTMLElement, show: Show, before: Shown | null, raw: RawPage): Shown {
  if (!before) return show(root, raw, (page) => ({ step: newest(page, 0) }));
  const { page: was, looking } = before;
  const [from, to] = before.visible();
  const follows = looking.step === newest(was, looking.rank);
  const view = document.activeElement?.id === "search";
  before.close();
  const after = show(root, raw, (page) => {
    const rank = Math.min(looking.rank, page.ranks.length - 1);
    const { query, allRanks, other } = looking;
    const there = page.ranks[rank].figures.steps.some((one) => one.step === looking.step);
    const step = looking.step === null ? null : follows || !there ? newest(page, rank) : looking.step;
    return { rank, allRanks, query, other, hits: matches(page.raw.names, query), step, selection: selected(was, page, looking, rank, step) };
  });
  const { rank, step } = after.looking;
  const [a, b] = was.ranks[looking.rank].interval(looking.step);
  const [begin] = after.page.ranks[rank].interval(step);
  const whole = from < a && to > b;
  if (step === looking.step && step !== null) after.look(from, to);
  else if (!whole && step !== null) after.look(from - a + begin, to - a + begin);
  const search = document.getElementById("search") as HTMLInputElement;
  search.value = looking.query;
  if (view) search.focus();
  return after;
}

function newest(page: Page, rank: number): number | null {
  return page.ranks[rank].figures.steps.at(-1)?.step ?? null;
}

// The selected tensor, where its step is still the one that is looked at.
function selected(was: Page, page: Page, looking: Looking, rank: number, step: number | null): Looking["selection"] {
  const { selection } = looking;
  if (!selection || selection.life < 0 || step !== looking.step) return null;
  const from = was.ranks[selection.rank].lives;
  const { lives } = page.ranks[rank];
  const life = lives.id.findIndex((id, i) => id === from.id[selection.life] && lives.step[i] === from.step[selection.life]);
  return life < 0 ? null : { kind: "life", rank, life, row: -1, index: -1 };
}
