import type { BothTokens, HeadAt, Scene } from "../data";
import { choice, h, tick } from "../dom";
import { figure, shortened } from "../numbers/format";
import { DeepMap, type Cell } from "../parts/deepmap";
import { Legend } from "../parts/legend";
import { mapControls } from "../parts/mapcontrols";
import { DifferencePicture, HeadPicture, type Picture } from "../parts/pictures";
import {
  chosen,
  headAt,
  headName,
  latest,
  lookOf,
  named,
  tokensOf,
  touches,
  type Context,
  type MakeView,
} from "./view";

const nameOf = ({ scene, layer, head }: HeadAt): string => `${scene}/${layer}/${head}`;

const within = (text: string | undefined, size: number): boolean => /^\d{1,9}$/.test(text ?? "") && Number(text) < size;

/** The head that is named, null if there is none. */
function headNamed(text: string, scenes: readonly Scene[]): HeadAt | null {
  const [name = "", layer, head] = text.split("/");
  const [id, b] = name.split(":");
  const scene = scenes.find((one) => one.id === id);
  if (!scene || !within(b ?? "0", scene.batch) || !within(layer, scene.layers.length)) return null;
  const at = { scene: name, layer: Number(layer), head: Number(head) };
  return within(head, scene.layers[at.layer].heads) ? at : null;
}

/** The next head of the same layer. */
function nextHead(here: HeadAt, scenes: readonly Scene[]): HeadAt {
  const heads = scenes.find((scene) => scene.id === here.scene.split(":")[0])?.layers[here.layer].heads ?? 1;
  return { ...here, head: (here.head + 1) % heads };
}

/** The head that the chosen one is compared with. */
export const comparedHead = ({ store, scenes }: Context): HeadAt =>
  headNamed(store.state.other, scenes) ?? nextHead(headAt(store.state), scenes);

/** Two heads side by side, and how they differ; of two prompts or captures as well. */
export const compareView: MakeView = (context) => {
  const { data, store, scenes } = context;
  const legends = [new Legend(), new Legend()];
  const readout = h("p", { class: "readout" });
  const pickers = h("div", { class: "controls" });
  const message = h("p", { class: "empty" });
  let locked = true;
  let moving = false;
  let pictures: Picture[] = [];
  let maps: DeepMap[] = [];

  const other = (): HeadAt => comparedHead(context);

  const follow = (leader: DeepMap): void => {
    if (pictures[0]) legends[0].show(pictures[0], maps[0].level);
    if (pictures[2]) legends[1].show(pictures[2], maps[2].level);
    if (!locked || moving) return;
    moving = true;
    for (const map of maps) if (map !== leader) map.follow(leader);
    moving = false;
  };
  const write = latest(context.fail);
  const describe = (cell: Cell): void =>
    write(async (current) => {
      const ends = [headAt(store.state), other()];
      const [query, key, ...weights] = await Promise.all([
        named(context, "query", cell.i),
        named(context, "key", cell.j),
        ...ends.map(async (at) => {
          const info = await data.map(at);
          return cell.i < info.n_q && cell.j < info.n_k ? data.weight(at, info, cell.i, cell.j) : NaN;
        }),
      ]);
      if (!current()) return;
      const [a, b] = weights;
      readout.replaceChildren(
        `query ${query} → key ${key} `,
        h("output", {}, `${figure(a)} and ${figure(b)}`),
        ` difference ${figure((a || 0) - (b || 0))}`,
      );
    });
  const point = (cell: Cell | null): void => {
    for (const map of maps) map.mark(cell);
    describe(cell ?? chosen(context));
  };
  maps = ["The first head", "The second head", "The difference"].map(
    (label) =>
      new DeepMap({
        label: `${label}. Arrow keys move the chosen pair.`,
        minimap: false,
        onPoint: point,
        onPick: (cell) => store.set(cell),
        onMove: follow,
        onError: context.fail,
      }),
  );
  const captions = maps.map(() => h("h2", {}));
  const panes = maps.map((map, k) => h("div", { class: "pane" }, captions[k], map.element));
  // Where there is room for one map, these choose which.
  const turns = maps.map((_, k) => h("button", { type: "button", click: () => turn(k) }));
  const turn = (to: number): void => {
    panes.forEach((pane, k) => pane.classList.toggle("turned", k === to));
    turns.forEach((button, k) => button.setAttribute("aria-pressed", String(k === to)));
    const seen = maps.find((map) => map.element.clientWidth && map !== maps[to]) ?? maps[0];
    requestAnimationFrame(() => locked && maps[to].follow(seen));
  };
  const element = h(
    "section",
    { class: "view compare", "aria-label": "Compare" },
    pickers,
    mapControls(
      store,
      tick("Lock the zoom", locked, (on) => (locked = on)),
    ),
    h("div", { class: "turns", role: "group", "aria-label": "The map that is seen" }, ...turns),
    h("div", { class: "panes" }, ...panes),
    message,
    h("div", { class: "below" }, readout, ...legends.map((legend) => legend.element)),
  );

  function drawPickers(): void {
    const at = other();
    const scene = scenes.find((one) => one.id === at.scene.split(":")[0]) as Scene;
    const set = (to: HeadAt): void => store.set({ other: nameOf(to) });
    pickers.replaceChildren(
      h("span", { class: "lead" }, "Compare with"),
      choice(
        "Text",
        scenes.map((one) => [one.id, one.name] as const),
        scene.id,
        (id) => set({ scene: id, layer: 0, head: 0 }),
      ),
      choice(
        "Layer",
        scene.layers.map(({ number }, l) => [String(l), String(number)] as const),
        String(at.layer),
        (layer) => set({ ...at, layer: Number(layer), head: 0 }),
      ),
      choice(
        "Head",
        scene.layers[at.layer].numbers.map((number, k) => [String(k), String(number)] as const),
        String(at.head),
        (head) => set({ ...at, head: Number(head) }),
      ),
    );
  }

  const load = latest(context.fail);
  const show = (): void =>
    load(async (current) => {
      drawPickers();
      const ends = [headAt(store.state), other()];
      const look = lookOf(store.state);
      const heads = await Promise.all(ends.map((at) => HeadPicture.of(data, at, look)));
      if (!current()) return;
      const [a, b] = heads;
      const alike = a.info.n_q === b.info.n_q && a.info.n_k === b.info.n_k;
      pictures = alike ? [a, b, new DifferencePicture(data, ends[0], ends[1], [a, b], look)] : [a, b];
      panes[2].hidden = !alike;
      legends[1].element.hidden = !alike;
      turns[2].hidden = !alike;
      turn(0);
      const { other: asked } = store.state;
      message.textContent = [
        asked && !headNamed(asked, scenes) && `The head that was compared, ${shortened(asked)}, is not here any more.`,
        !alike && "These maps have different sizes, so there is no difference to draw.",
      ]
        .filter(Boolean)
        .join(" ");
      const mine = tokensOf(context);
      const theirs = ends[1].scene === ends[0].scene ? mine : tokensAt(ends[1].scene);
      pictures.forEach((picture, k) => maps[k].show(picture, k === 1 ? theirs : mine));
      [...ends.map(captionOf), "Difference"].forEach((text, k) => {
        captions[k].textContent = text;
        turns[k].textContent = text;
      });
      pick();
    });
  const tokensAt = (scene: string): BothTokens =>
    scenes.find((one) => one.id === scene.split(":")[0])?.has_tokens
      ? { query: data.tokens(scene, "query"), key: data.tokens(scene, "key") }
      : { query: null, key: null };
  const captionOf = (at: HeadAt): string => {
    const scene = scenes.find((one) => one.id === at.scene.split(":")[0]) as Scene;
    return `${headName(scene, at.layer, at.head)}${at.scene === store.state.scene ? "" : ` · ${scene.name}`}`;
  };
  const pick = (): void => {
    const cell = chosen(context);
    for (const map of maps) map.choose(cell);
    describe(cell);
  };

  return {
    element,
    update(state, changed) {
      if (touches(changed, "scene", "layer", "head", "other")) show();
      else if (touches(changed, "kind", "tone", "scale", "hide")) {
        pictures.forEach((picture, k) => {
          picture.look = lookOf(state);
          maps[k].recolour();
        });
        follow(maps[0]);
      }
      if (pictures.length && (changed.has("i") || changed.has("j"))) pick();
    },
    destroy: () => maps.forEach((map) => map.destroy()),
  };
};
