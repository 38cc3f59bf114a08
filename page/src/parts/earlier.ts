/** The path through two heads: which earlier heads wrote what the chosen head reads at the chosen key. */

import type { Earlier } from "../data";
import { h } from "../dom";
import { count, figure, printable, weightText } from "../numbers/format";
import { headAt, headName, tokensOf, type Context } from "../views/view";
import { amount } from "./amount";

const LISTED = 8;

/** What the product of a line is. */
export const productSaid = (values: boolean): string =>
  values
    ? "weight here × weight there × the length of the value that it moved"
    : "weight here × weight there: no values are known, so the first token is left aside";

/** What is said where no earlier head reads a token that tells something. */
const AT_REST = "All of these read the first token, where heads rest: choose a later word to see a path.";

/** The key that a row reads most; where keys are the same tokens none that is the first, where heads rest. */
export function readAt(row: Float32Array, same: boolean): number {
  const from = same && row.length > 1 ? 1 : 0;
  return row.reduce((best, weight, j) => (j >= from && weight > (row[best] || 0) ? j : best), from);
}

type Line = Earlier["heads"][number];

/** A line: an earlier head, the token that it read there, its weight and the product. */
function line(context: Context, one: Line, word: string, most: number, j: number): HTMLElement {
  const name = headName(context.scene, one.layer, one.head);
  const go = (): void => context.store.set({ layer: one.layer, head: one.head, i: j, j: one.key });
  const product = figure(one.product);
  return h(
    "tr",
    { "data-earlier": `${one.layer}/${one.head}`, "data-product": one.product },
    h("th", { scope: "row" }, h("button", { type: "button", class: "link", click: go }, name)),
    h("td", {}, h("span", { class: "word", "data-token": one.key }, word), h("small", {}, ` ${count(one.key)}`)),
    h("td", { class: "plain" }, weightText(one.weight)),
    h("td", {}, amount(one.product / most, product, "taken")),
  );
}

function table(context: Context, { heads }: Earlier, words: readonly string[], j: number): HTMLElement {
  const titles = ["head", "reads", "weight", "product"];
  const most = heads[0].product || 1;
  return h(
    "table",
    { class: "odds" },
    h("thead", {}, h("tr", {}, ...titles.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, ...heads.slice(0, LISTED).map((one, k) => line(context, one, words[k], most, j))),
  );
}

/** The earlier heads on the path to query i through key j, each a button that goes to its own cell. */
export async function earlierHeads(context: Context, i: number, j: number): Promise<HTMLElement[]> {
  const { data, store, scene, words } = context;
  const at = headAt(store.state);
  const told = await data.earlier(at, i, j);
  const keys = tokensOf(context).key;
  const listed = told.heads.slice(0, LISTED).map(({ key }) => key);
  await Promise.all([j, ...listed].map((key) => keys?.load(key, key + 1)));
  const word = (key: number): string => (keys ? `“${printable(keys.at(key) ?? "")}”` : `token ${count(key)}`);
  const name = headName(scene, at.layer, at.head);
  const help = (text: string): HTMLElement => h("p", { class: "help" }, text);
  const heading = h("h2", {}, `Earlier heads that wrote what ${name} reads at ${word(j)}`);
  if (told.why) return [heading, help(told.why)];
  if (!told.heads.length) return [heading, help("None of them read another token for it.")];
  return [
    heading,
    help(`${name} reads it with weight ${weightText(told.weight)}. Ranked by ${productSaid(told.values)}.`),
    table(context, told, listed.map(word), j),
    ...(listed.every((key) => key === 0) ? [help(AT_REST)] : []),
    help(words.no_proof),
  ];
}
