/** Maps of two heads and of their difference side by side, which are zoomed and pointed at together. */

import type { BothTokens } from "../data";
import { h, tick } from "../dom";
import { DeepMap, type Cell } from "./deepmap";
import { Legend } from "./legend";
import type { Look, Picture } from "./pictures";

const LABELS = ["The first head", "The second head", "The difference"];
const DIFFERENCE = 2;

export interface MapPanesOptions {
  /** The cell that is pointed at in one of the maps; null when there is none. */
  onPoint(cell: Cell | null): void;
  onPick(cell: Cell): void;
  onError(error: unknown): void;
}

/** What one of the maps shows. */
export interface Pane {
  caption: string;
  picture: Picture;
  tokens: BothTokens;
}

export class MapPanes {
  /** Whether one map is zoomed as another is. */
  private locked = true;
  /** Whether maps follow another one right now, which no map is to follow. */
  private following = false;
  private pictures: readonly Picture[] = [];
  private readonly maps: readonly DeepMap[];
  private readonly captions = LABELS.map(() => h("h2", {}));
  private readonly panes: readonly HTMLElement[];
  private readonly turns = LABELS.map((_, k) => h("button", { type: "button", click: () => this.turn(k) }));
  /** Of the heads, and of their difference. */
  private readonly legends = [new Legend(), new Legend()] as const;
  readonly lock = tick("Lock the zoom", this.locked, (on) => (this.locked = on));
  /** Where there is room for one map, these choose which. */
  readonly turner = h("div", { class: "turns", role: "group", "aria-label": "The map that is seen" }, ...this.turns);
  readonly element: HTMLElement;
  readonly keys: readonly HTMLElement[] = this.legends.map((legend) => legend.element);

  constructor(private readonly options: MapPanesOptions) {
    this.maps = LABELS.map((label) => this.map(label));
    this.panes = this.maps.map((map, k) => h("div", { class: "pane" }, this.captions[k], map.element));
    this.element = h("div", { class: "panes" }, ...this.panes);
  }

  /** Whether anything is shown yet. */
  get shown(): boolean {
    return this.pictures.length > 0;
  }

  /** Shows two heads, and their difference if there is one. */
  show(shown: readonly Pane[], difference: Picture | null): void {
    const all = difference
      ? [...shown, { caption: "Difference", picture: difference, tokens: shown[0].tokens }]
      : shown;
    this.pictures = all.map(({ picture }) => picture);
    for (const part of [this.panes[DIFFERENCE], this.turns[DIFFERENCE], this.keys[1]]) part.hidden = !difference;
    this.turn(0);
    all.forEach(({ caption, picture, tokens }, k) => {
      this.maps[k].show(picture, tokens);
      this.captions[k].textContent = this.turns[k].textContent = caption;
    });
  }

  /** Marks the chosen pair. */
  choose(cell: Cell): void {
    for (const map of this.maps) map.choose(cell);
  }

  recolour(look: Look): void {
    this.pictures.forEach((picture, k) => {
      picture.look = look;
      this.maps[k].recolour();
    });
    this.follow(this.maps[0]);
  }

  destroy(): void {
    for (const map of this.maps) map.destroy();
  }

  private map(label: string): DeepMap {
    return new DeepMap({
      label: `${label}. Arrow keys move the chosen pair.`,
      minimap: false,
      onPoint: (cell) => {
        for (const map of this.maps) map.mark(cell);
        this.options.onPoint(cell);
      },
      onPick: this.options.onPick,
      onMove: (map) => this.follow(map),
      onError: this.options.onError,
    });
  }

  /** What goes with a map that moved: the other maps, and the keys of the colours. */
  private follow(leader: DeepMap): void {
    if (this.pictures[0]) this.legends[0].show(this.pictures[0], this.maps[0].level);
    if (this.pictures[DIFFERENCE]) this.legends[1].show(this.pictures[DIFFERENCE], this.maps[DIFFERENCE].level);
    if (!this.locked || this.following) return;
    this.following = true;
    for (const map of this.maps) if (map !== leader) map.follow(leader);
    this.following = false;
  }

  /** Turns to a map where there is room for one; it is zoomed as the one that was seen. */
  private turn(to: number): void {
    this.panes.forEach((pane, k) => pane.classList.toggle("turned", k === to));
    this.turns.forEach((button, k) => button.setAttribute("aria-pressed", String(k === to)));
    const seen = this.maps.find((map) => map.element.clientWidth && map !== this.maps[to]) ?? this.maps[0];
    requestAnimationFrame(() => this.locked && this.maps[to].follow(seen));
  }
}
