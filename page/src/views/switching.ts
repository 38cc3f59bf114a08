/** Whether heads of a scene can be switched off, and what it lacks if not. */

import type { Scene } from "../data";
import type { Source } from "../source/source";

type Kind = Source["kind"];

/** Whether the model of a scene runs here: in the server, in the kernel, or in a file that holds it. */
export const runsHere = (scene: Scene, source: Kind): boolean =>
  scene.settings !== null && (source !== "file" || scene.editable);

const ELSEWHERE = "The how-to “Knock out edges and heads” of the documentation runs a model of yours without a head.";

/** What a scene lacks, by its kind, and what would give it. */
const LACKS: Record<string, string> = {
  example:
    "This page was saved without its model. `regard look --save page.html --with-model` saves both, and " +
    "`regard look` runs the model.",
  own:
    "This page was saved without its model: a page runs regard's example model alone, no model of PyTorch. " +
    "`regard look --model` runs yours.",
  cross: "This attention is made by hand: there is no model that expects something next.",
  model: `What is kept of a run are queries, keys and values, not the model. ${ELSEWHERE}`,
  capture: `A capture holds queries, keys and values, not the model that made them. ${ELSEWHERE}`,
  arrays: `Arrays are queries and keys without the model that made them. ${ELSEWHERE}`,
};

/** Why no head of a scene can be switched off, and where one can be; empty if they can. */
export function whyNot(scene: Scene, scenes: readonly Scene[], source: Kind): string {
  if (runsHere(scene, source)) return "";
  const other = scenes.find((one) => runsHere(one, source));
  return [
    "No head can be switched off here.",
    LACKS[scene.kind === "model" && scene.settings ? "own" : scene.kind] ?? ELSEWHERE,
    ...(other ? [`The heads of “${other.name}” can be: choose it above.`] : []),
  ].join(" ");
}
