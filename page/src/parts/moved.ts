/** What a row of weights takes along: the weight of each key, and that times the length of its value. */

import { h } from "../dom";
import { count, figure, printable } from "../numbers/format";
import { headAt, headName, tokensOf, type Context } from "../views/view";
import { amount } from "./amount";

const LISTED = 8;

/** What the number beside a weight is. */
export const TAKEN = "weight × the length of the value: how much of this key is taken along";

/** Weights times the lengths of values; empty where those are not known. */
export const takenOf = (row: Float32Array, norms: Float32Array): Float32Array =>
  norms.length ? row.map((weight, j) => weight * norms[j]) : norms;

/** The keys of which query i takes most, by weight × ‖value‖. */
export async function moved(context: Context, i: number): Promise<HTMLElement[]> {
  const { data, store, scene } = context;
  const at = headAt(store.state);
  const keys = tokensOf(context).key;
  const heading = h("h2", {}, `What ${headName(scene, at.layer, at.head)} takes along: weight × ‖value‖`);
  const row = await data.row(at, i);
  const norms = await data.norms(at);
  if (!norms.length) return [heading, h("p", { class: "help" }, "Not shown: no values are known.")];
  const taken = takenOf(row, norms).map((x) => x || 0); // of hidden keys nothing
  const listed = new Set<number>();
  for (const by of [taken, row.map((weight) => (weight > 0 ? weight : 0))])
    for (const j of [...by.keys()].sort((a, b) => by[b] - by[a]).slice(0, LISTED)) if (row[j] > 0) listed.add(j);
  const order = [...listed].sort((a, b) => taken[b] - taken[a]).slice(0, LISTED + 2);
  await Promise.all(order.map((j) => keys?.load(j, j + 1)));
  const [most, heaviest] = [Math.max(...order.map((j) => taken[j])) || 1, Math.max(...order.map((j) => row[j])) || 1];
  const cell = (value: number, top: number, name: string): HTMLElement =>
    h("td", { [`data-${name}`]: value }, amount(value / top, figure(value), name));
  const titles = ["key", "weight", "‖value‖", "weight × ‖value‖"];
  return [
    heading,
    h("p", { class: "help" }, "A large weight on a short value moves little: the output is the sum of weight × value."),
    h(
      "table",
      { class: "odds" },
      h("thead", {}, h("tr", {}, ...titles.map((text) => h("th", { scope: "col" }, text)))),
      h(
        "tbody",
        {},
        ...order.map((j) =>
          h(
            "tr",
            { "data-key": j },
            h(
              "th",
              { scope: "row" },
              keys && h("span", { class: "word" }, printable(keys.at(j) ?? "")),
              h("small", {}, ` ${count(j)}`),
            ),
            cell(row[j], heaviest, "weight"),
            h("td", { class: "plain" }, figure(norms[j])),
            cell(taken[j], most, "taken"),
          ),
        ),
      ),
    ),
  ];
}
