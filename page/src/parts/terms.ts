/** Terms of the field inside a sentence, each a button that opens its meaning. */

import type { Words } from "../data";
import { h } from "../dom";
import { explained } from "./explained";

/** What a term means, plainly too. */
function meanings(words: Words): Map<string, string> {
  const ended = (text: string): string => (text.endsWith("?") ? text : `${text}.`);
  const terms = words.glossary.map(
    ({ name, meaning, plain }) => [name, `${meaning} Plainly: ${ended(plain)}`] as const,
  );
  return new Map([...terms, ...words.kinds.map(({ name, definition }) => [name, definition] as const)]);
}

const escape = (text: string): string => text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");

/** A sentence as nodes: terms are buttons where they come first, and say what they mean. */
export function withTerms(text: string, words: Words): Node[] {
  const known = meanings(words);
  const names = [...known.keys()].sort((a, b) => b.length - a.length).map(escape);
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}])(${names.join("|")})(?![\\p{L}\\p{N}])`, "gu");
  return text.split(pattern).flatMap((part, k): Node[] => {
    const meaning = k % 2 ? known.get(part) : undefined;
    known.delete(part);
    return meaning === undefined ? [document.createTextNode(part)] : explained(part, meaning);
  });
}

/** The meaning of a kind of head, for a title. */
export const definitionOf = (kind: string, words: Words): string =>
  words.kinds.find(({ name }) => name === kind)?.definition ?? "";

/** The line of a view, in the words of its colour scale. */
export function lineOf(view: string, words: Words, dark: boolean, sink = false): string {
  const line = (words.views[view] ?? "").replaceAll("{more}", words.more[dark ? 1 : 0]);
  return line.replace("{sum}", words.sums[sink ? 1 : 0]);
}

/** A pattern with its gaps filled. */
export function filled(pattern: string, parts: Record<string, string>): string {
  return pattern.replace(/\{(\w+)\}/g, (gap, name: string) => parts[name] ?? gap);
}

export function glossary(words: Words): HTMLElement {
  const terms = words.glossary.flatMap(({ name, meaning, plain }) => [
    h("dt", {}, name),
    h("dd", {}, `${meaning} `, h("em", {}, plain)),
  ]);
  const kinds = words.kinds.flatMap(({ name, meaning, definition }) => [
    h("dt", {}, name),
    h("dd", {}, `${definition} Score: ${meaning}.`),
  ]);
  return h(
    "div",
    { class: "glossary" },
    h("h2", {}, "Glossary"),
    h("dl", {}, ...terms),
    h("h2", {}, "Kinds of heads"),
    h("p", {}, words.tentative),
    h("dl", {}, ...kinds),
  );
}
