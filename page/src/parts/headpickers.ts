/** Lists that choose a head: its text, its layer, its number. */

import type { HeadAt, Scene } from "../data";
import { choice, h } from "../dom";
import { sceneOf } from "../views/compared";

export function headPickers(scenes: readonly Scene[], at: HeadAt, pick: (head: HeadAt) => void): HTMLElement[] {
  const scene = sceneOf(at, scenes) as Scene;
  const texts = scenes.map((one) => [one.id, one.name] as const);
  const layers = scene.layers.map(({ number }, l) => [String(l), String(number)] as const);
  const heads = scene.layers[at.layer].numbers.map((number, k) => [String(k), String(number)] as const);
  return [
    h("span", { class: "lead" }, "Compare with"),
    choice("Text", texts, scene.id, (id) => pick({ scene: id, layer: 0, head: 0 })),
    choice("Layer", layers, String(at.layer), (layer) => pick({ ...at, layer: Number(layer), head: 0 })),
    choice("Head", heads, String(at.head), (head) => pick({ ...at, head: Number(head) })),
  ];
}
