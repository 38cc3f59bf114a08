/** A head as a card: its picture, its kinds, and its score where heads are sorted by one. */

import type { Column, HeadRow, Told } from "../data";
import { h } from "../dom";
import { figure, scoreText } from "../numbers/format";
import { headName, scaleName, type Context } from "../views/view";
import { kindsOf } from "./headgrid";
import { saysOf, shortOf } from "./sentences";
import { definitionOf } from "./terms";

/** A column that heads are sorted by, and the end of its scale. */
export interface Sorted {
  column: Column;
  high: number;
}

/** The end of a column's scale: the largest score there is, where nothing else is. */
export const highest = (column: Column, rows: readonly HeadRow[]): number =>
  column.high ?? Math.max(column.low, ...rows.map((row) => row.scores[column.name] ?? column.low));

const kindLines = (row: HeadRow): HTMLElement[] =>
  row.kinds.map(({ name, score, tentative }) =>
    h(
      "span",
      { class: tentative ? "kind tentative" : "kind" },
      h("span", {}, `${name}${tentative ? "?" : ""}`),
      h("b", {}, scoreText(score)),
    ),
  );

/** What a head of no kind does on this text, once it is known. */
function claimLine(context: Context, { layer, head }: HeadRow): HTMLElement {
  const { data, store, words } = context;
  const line = h("span", { class: "kind claim" });
  const say = (heads: Told[][]): void => {
    line.textContent = shortOf(heads[head], words);
    line.title = saysOf(heads[head], words, scaleName(store.state) !== "ink");
  };
  data.claims(store.state.scene, layer).then(say, context.fail);
  return line;
}

function scoreBar(row: HeadRow, { column, high }: Sorted): HTMLElement {
  const score = row.scores[column.name];
  const share = typeof score === "number" ? (score - column.low) / (high - column.low || 1) : 0;
  const bar = h("span", { class: "bar" });
  bar.style.setProperty("--share", String(Math.max(0, Math.min(1, share))));
  const said = figure(score, 2);
  return h("span", { class: "score" }, bar, h("span", {}, said));
}

/** The card of a head, which opens its map; its picture is to be put into `picture`. */
export function headCard(context: Context, row: HeadRow, picture: HTMLElement, sorted: Sorted | null): HTMLElement {
  const { scene, store } = context;
  const { number, numbers } = scene.layers[row.layer];
  const current = row.layer === store.state.layer && row.head === store.state.head;
  const score = sorted && `${sorted.column.label} ${figure(row.scores[sorted.column.name])}`;
  const said = [`Layer ${number}, head ${numbers[row.head]}`, kindsOf(row), score].filter(Boolean).join(", ");
  const defined = row.kinds.map((one) => definitionOf(one.kind, context.words)).join(" ");
  return h(
    "button",
    {
      type: "button",
      class: current ? "card current" : "card",
      title: `${said}. Open its map.${defined ? `\n${defined}` : ""}`,
      click: () => store.set({ view: "map", layer: row.layer, head: row.head }),
    },
    picture,
    h("span", { class: "name" }, headName(scene, row.layer, row.head)),
    ...(row.kinds.length ? kindLines(row) : [claimLine(context, row)]),
    sorted && scoreBar(row, sorted),
  );
}
