/** Which two heads are compared. */

import type { HeadAt, Scene } from "../data";
import { shortened } from "../numbers/format";
import { headAt, headName, type Context } from "./view";

/** The other head as the address names it. */
export const addressOf = ({ scene, layer, head }: HeadAt): string => `${scene}/${layer}/${head}`;

const within = (text: string | undefined, size: number): boolean => /^\d{1,9}$/.test(text ?? "") && Number(text) < size;

/** The scene that a head is of. */
export const sceneOf = ({ scene }: Pick<HeadAt, "scene">, scenes: readonly Scene[]): Scene | undefined =>
  scenes.find((one) => one.id === scene.split(":")[0]);

/** The head that is named, null if there is none. */
export function headNamed(text: string, scenes: readonly Scene[]): HeadAt | null {
  const [name = "", layer, head] = text.split("/");
  const scene = sceneOf({ scene: name }, scenes);
  if (!scene || !within(name.split(":")[1] ?? "0", scene.batch) || !within(layer, scene.layers.length)) return null;
  const at = { scene: name, layer: Number(layer), head: Number(head) };
  return within(head, scene.layers[at.layer].heads) ? at : null;
}

/** The next head of the same layer. */
function nextHead(here: HeadAt, scenes: readonly Scene[]): HeadAt {
  const heads = sceneOf(here, scenes)?.layers[here.layer].heads ?? 1;
  return { ...here, head: (here.head + 1) % heads };
}

/** The head that the chosen one is compared with. */
export const comparedHead = ({ store, scenes }: Context): HeadAt =>
  headNamed(store.state.other, scenes) ?? nextHead(headAt(store.state), scenes);

/** A head's name; of another scene than the chosen one, that too. */
export function captionOf({ store, scenes }: Context, at: HeadAt): string {
  const scene = sceneOf(at, scenes) as Scene;
  return `${headName(scene, at.layer, at.head)}${at.scene === store.state.scene ? "" : ` · ${scene.name}`}`;
}

/** What is amiss with a comparison, in sentences: the head of a link that is gone, maps of two sizes. */
export function amiss({ store, scenes }: Context, alike: boolean): string {
  const { other } = store.state;
  const gone = other && !headNamed(other, scenes);
  return [
    gone && `The head that was compared, ${shortened(other)}, is not here any more.`,
    !alike && "These maps have different sizes, so there is no difference to draw.",
  ]
    .filter(Boolean)
    .join(" ");
}
