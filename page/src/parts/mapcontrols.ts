import { choice, h, tick } from "../dom";
import type { Kind } from "../data";
import type { Tone } from "../numbers/colour";
import type { State, Store } from "../state";

/** How weights become places on the scale of colours. */
export function toneChoice(store: Store): HTMLElement {
  const tones = [
    ["linear", "linear"],
    ["root", "square root"],
    ["log", "logarithm"],
  ] as const;
  return choice("Scale", tones, store.state.tone, (tone) => store.set({ tone: tone as Tone }));
}

/** Whether what rests on the first key, or on a learned sink, is drawn. */
export const hideTick = (store: Store): HTMLElement =>
  tick(
    "Hide the sink",
    store.state.hide,
    (hide) => store.set({ hide }),
    "Weight on the first keys, and on a learned sink, is not drawn; colours are scaled to the rest.",
  );

/** How a map is drawn. */
export function mapControls(store: Store, ...more: HTMLElement[]): HTMLElement {
  const { state } = store;
  return h(
    "div",
    { class: "controls" },
    choice(
      "Pooling",
      [
        ["max", "max pooling"],
        ["mass", "mass pooling"],
      ],
      state.kind,
      (kind) => store.set({ kind: kind as Kind }),
    ),
    toneChoice(store),
    choice(
      "Colours",
      [
        ["auto", "automatic"],
        ["viridis", "viridis"],
        ["cividis", "cividis"],
        ["ink", "ink"],
        ["night", "night"],
      ],
      state.scale,
      (scale) => store.set({ scale: scale as State["scale"] }),
    ),
    hideTick(store),
    ...more,
  );
}
