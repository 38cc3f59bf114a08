/** A map that is zoomed like one: tiles by OpenSeadragon, rulers, a crosshair, numbers where there is room for them. */

import OpenSeadragon from "openseadragon";

import type { BothTokens } from "../data";
import { fitted, h, perFrame } from "../dom";
import { short } from "../numbers/format";
import { perPixel, tileBlock } from "../numbers/levels";
import { CELL, TOKEN, type Pointed } from "./lit";
import type { Picture, Pixels } from "./pictures";
import { PointerTag } from "./pointertag";
import { drawMarks, type GridMarks } from "./gridmarks";
import { drawRuler } from "./rulers";
import { SinkColumn } from "./sinkcolumn";
import { cellWidth, stageOf, WIDEST_CELL } from "./stage";

export interface Cell {
  i: number;
  j: number;
}

export interface DeepMapOptions {
  label: string;
  minimap: boolean;
  /** Where rows of pictures begin among the tokens. */
  marks?: GridMarks;
  /** The cell under the pointer or the crosshair; null when there is none. */
  onPoint(cell: Cell | null): void;
  /** A cell was chosen. */
  onPick(cell: Cell): void;
  /** What is seen changed: position, zoom or level. */
  onMove(map: DeepMap): void;
  onError(error: unknown): void;
  /** Nothing moves any more; the part that is seen, as `part` has it. */
  onRest?(part: string): void;
}

interface Tile {
  level: number;
  x: number;
  y: number;
  beingDrawn: boolean;
}

interface TileJob {
  tile: Tile;
  finish(data: CanvasRenderingContext2D, request: null, type: string): void;
  fail(message: string, request: null): void;
}

/** The least width of a cell in pixels that holds a number. */
const ROOM_FOR_NUMBERS = 44;
/** Numbers below this do not ask to be read. */
const FAINT = 0.01;
/** Milliseconds until what is not whole is asked for again. */
const AGAIN_MS = 250;
/** Milliseconds without a movement after which a map is at rest. */
const REST_MS = 400;
const calm = (): boolean => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class DeepMap {
  readonly element: HTMLElement;
  private readonly stage: HTMLElement;
  private readonly overlay = h("canvas", { class: "overlay sheet", "aria-hidden": "true" });
  /** The paper that the map is on: hidden pairs show it. */
  private readonly ground = h("div", { class: "ground", "aria-hidden": "true" });
  private readonly corner = h(
    "div",
    { class: "corner", "aria-hidden": "true" },
    h("span", {}, "key →"),
    h("span", {}, "query ↓"),
  );
  private readonly top = h("canvas", { class: "ruler top", "aria-hidden": "true" });
  private readonly left = h("canvas", { class: "ruler left", "aria-hidden": "true" });
  private readonly sinks = new SinkColumn();
  private readonly viewer: OpenSeadragon.Viewer;
  private readonly watcher: ResizeObserver;
  private picture: Picture | null = null;
  private tokens: BothTokens = { query: null, key: null };
  private pointed: Cell | null = null;
  private chosen: Cell | null = null;
  /** The value beside the pointer, for who knows it. */
  readonly tag = new PointerTag();
  /** Where the pointer is, in pixels of the stage: what lies below it changes when the map moves. */
  private pointer: { x: number; y: number } | null = null;
  private readonly waiting = h("p", { class: "waiting", role: "status" }, "The first part of this map is on its way …");
  private resting = 0;
  /** The part to show when the map is open. */
  private wanted: string | null = null;
  private generation = 0;
  /** Tiles of which parts were not computed yet when they were painted. */
  private unfinished = new Map<Tile, CanvasRenderingContext2D>();
  private growing = 0;
  /** Whether all is shown, and should be when the page changes its size. */
  private whole = true;
  private readonly draw = perFrame(() => this.drawNow());

  constructor(private readonly options: DeepMapOptions) {
    const place = h("div", { class: "osd" });
    this.stage = h(
      "div",
      {
        class: "stage",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "zoomable map",
        "aria-label": options.label,
      },
      this.ground,
      place,
      this.overlay,
      this.tag.element,
      this.waiting,
    );
    const { label, element: sinks } = this.sinks;
    this.element = h("div", { class: "deepmap" }, this.corner, label, this.top, this.left, sinks, this.stage);
    this.viewer = new OpenSeadragon.Viewer(viewerOptions(place, options.minimap));
    for (const element of place.querySelectorAll("[tabindex]")) element.setAttribute("tabindex", "-1");
    this.listen();
    this.watchPointer();
    this.watcher = new ResizeObserver(() => {
      this.fit();
      if (this.whole && this.viewer.isOpen()) {
        this.home(true);
        // OpenSeadragon learns the new size with its next frame, and then zooms by itself.
        this.viewer.addOnceHandler("update-viewport", () => this.whole && this.home(true));
      }
      this.draw();
    });
    this.watcher.observe(this.element);
    this.watcher.observe(this.stage);
  }

  /** Hears what OpenSeadragon does. */
  private listen(): void {
    for (const event of ["update-viewport", "animation", "open", "resize"] as const) {
      this.viewer.addHandler(event, () => {
        this.draw();
        if (this.pointer) this.point(this.cellAt(this.pointer.x, this.pointer.y));
        this.options.onMove(this);
        this.restLater();
      });
    }
    this.viewer.addHandler("tile-loaded", () => (this.waiting.hidden = true));
    this.viewer.addHandler("canvas-click", (event) => {
      const cell = event.quick ? this.cellAt(event.position.x, event.position.y) : null;
      if (cell) this.options.onPick(cell);
    });
    this.viewer.addHandler("tile-load-failed", (event) => this.options.onError(new Error(event.message)));
    this.viewer.addHandler("canvas-scroll", (event) => {
      const turned = event.originalEvent as WheelEvent;
      // In a notebook the wheel scrolls the notebook, until the map is clicked.
      if (this.element.closest(".cell") && !turned.ctrlKey && !this.stage.contains(document.activeElement)) {
        [event.preventDefaultAction, event.preventDefault] = [true, false];
      } else this.whole = false;
    });
    for (const event of [
      "canvas-drag",
      "canvas-pinch",
      "canvas-double-click",
      "navigator-click",
      "navigator-drag",
    ] as const) {
      this.viewer.addHandler(event, () => (this.whole = false));
    }
  }

  private watchPointer(): void {
    this.stage.addEventListener("pointermove", (event) => {
      const box = this.stage.getBoundingClientRect();
      this.pointer = { x: event.clientX - box.left, y: event.clientY - box.top };
      this.point(this.cellAt(this.pointer.x, this.pointer.y));
      this.tag.move(this.pointed && this.pointer);
    });
    this.stage.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.tag.move(null);
      this.point(null);
    });
    this.stage.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener(TOKEN, (event) => {
      const pointed = (event as CustomEvent<Pointed | null>).detail;
      if (!this.chosen) return;
      const cell = pointed && { ...this.chosen, [pointed.axis === "query" ? "i" : "j"]: pointed.token };
      this.mark(cell);
      this.options.onPoint(cell);
    });
  }

  /** Gives the stage the shape of the matrix. */
  private fit(): void {
    if (!this.picture) return;
    const { n_q, n_k } = this.picture.info;
    const [left, top] = [this.corner.offsetWidth + this.sinks.label.offsetWidth, this.corner.offsetHeight];
    const { wide, high } = stageOf(n_q, n_k, this.element.clientWidth - left, this.element.clientHeight - top);
    this.element.style.setProperty("--wide", `${wide}px`);
    this.element.style.setProperty("--high", `${high}px`);
  }

  destroy(): void {
    this.watcher.disconnect();
    window.clearTimeout(this.growing);
    window.clearTimeout(this.resting);
    this.picture = null;
    this.viewer.destroy();
  }

  /** Shows a picture; stays where it is if the last one was as large. */
  show(picture: Picture, tokens: BothTokens): void {
    const before = this.picture?.info;
    const same = before?.n_q === picture.info.n_q && before.n_k === picture.info.n_k;
    const bounds = same ? this.viewer.viewport.getBounds(true) : null;
    this.waiting.hidden = same;
    this.picture = picture;
    this.tokens = tokens;
    this.sinks.shown = picture.sinks.length > 0;
    this.fit();
    this.generation++;
    this.unfinished = new Map();
    window.clearTimeout(this.growing);
    if (picture.done < 1) this.growLater();
    this.viewer.addOnceHandler("open", () => {
      if (this.wanted !== null) this.look(this.wanted);
      else if (bounds && !this.whole) this.viewer.viewport.fitBounds(bounds, true);
      else this.home(true);
    });
    this.viewer.open(this.source(picture) as unknown as OpenSeadragon.TileSourceSpecifier);
  }

  /** What is seen: the first and the last query and key, "queries,queries,keys,keys"; empty where that is all. */
  get part(): string {
    if (this.whole || !this.picture || !this.viewer.isOpen()) return "";
    const { x, y, step } = this.axes();
    const [wide, high] = [this.stage.clientWidth, this.stage.clientHeight];
    return [-y / step, (high - y) / step, -x / step, (wide - x) / step].map((at) => Number(at.toPrecision(6))).join();
  }

  /** Shows a part as `part` has it; all for one that is none. */
  look(part: string): void {
    const [r0, r1, c0, c1] = part.split(",").map((text) => (text.trim() ? Number(text) : NaN));
    const sound = [r0, r1, c0, c1].every(Number.isFinite) && r1 > r0 && c1 > c0;
    this.wanted = sound ? part : null;
    if (!this.picture || !this.viewer.isOpen()) return;
    this.wanted = null;
    if (!sound) {
      this.home(true);
      return;
    }
    this.whole = false;
    this.resize();
    const box = this.viewer.viewport.imageToViewportRectangle(new OpenSeadragon.Rect(c0, r0, c1 - c0, r1 - r0));
    this.viewer.viewport.fitBounds(box, true);
  }

  private restLater(): void {
    window.clearTimeout(this.resting);
    if (this.options.onRest) this.resting = window.setTimeout(() => this.options.onRest?.(this.part), REST_MS);
  }

  /** Draws the same tiles with the picture's colours as they are now. */
  recolour(): void {
    if (this.picture) this.show(this.picture, this.tokens);
  }

  private growLater(): void {
    this.growing = window.setTimeout(() => void this.grow().catch(this.options.onError), AGAIN_MS);
  }

  /** Paints what has been computed by now. */
  private async grow(): Promise<void> {
    const { picture, generation } = this;
    if (!picture) return;
    const rescaled = picture.done < 1 && (await picture.refresh());
    if (generation !== this.generation || !this.picture) return;
    if (rescaled) {
      this.recolour();
      return;
    }
    await Promise.all(
      [...this.unfinished].map(async ([tile, context]) => {
        if (!tile.beingDrawn) return;
        const pixels = await picture.pixels(tile.level, tile.x, tile.y);
        if (pixels.whole) this.unfinished.delete(tile);
        paint(context, pixels);
      }),
    );
    if (generation !== this.generation || !this.picture) return;
    this.viewer.forceRedraw();
    this.viewer.navigator?.forceRedraw();
    this.options.onMove(this);
    if (picture.done < 1 || this.unfinished.size) this.growLater();
  }

  choose(cell: Cell | null): void {
    this.chosen = cell;
    if (!this.pointer) this.pointed = null; // what was pointed at elsewhere lay in the row that was chosen before
    this.draw();
  }

  /** Another map's crosshair. */
  mark(cell: Cell | null): void {
    this.pointed = cell;
    this.draw();
  }

  /** Brings a cell into view, large enough to be told from its neighbours. */
  reveal(cell: Cell, pixels = 24): void {
    const { info } = this.picture as Picture;
    this.whole = false;
    const { x, y } = this.viewer.viewport.getContainerSize();
    const side = Math.min(
      Math.max(info.n_q, info.n_k),
      Math.max(1, Math.min(x, y)) / Math.max(pixels, this.axes().step),
    );
    const box = new OpenSeadragon.Rect(cell.j + 0.5 - side / 2, cell.i + 0.5 - side / 2, side, side);
    this.viewer.viewport.fitBounds(this.viewer.viewport.imageToViewportRectangle(box), calm());
  }

  home(atOnce = calm()): void {
    this.whole = true;
    this.resize();
    const [wide, high] = [this.stage.clientWidth, this.stage.clientHeight];
    if (!this.picture || !wide || !high) return;
    // Where the stage is larger than the map, the map lies at its rulers, and not in the middle.
    const { n_q, n_k } = this.picture.info;
    const step = cellWidth(n_q, n_k, wide, high);
    const seen = new OpenSeadragon.Rect(0, 0, wide / step, high / step);
    this.viewer.viewport.fitBounds(this.viewer.viewport.imageToViewportRectangle(seen), atOnce);
  }

  /** Tells OpenSeadragon a new size, which it learns later than this. */
  private resize(): void {
    this.viewer.viewport.resize(new OpenSeadragon.Point(this.stage.clientWidth, this.stage.clientHeight), false);
  }

  zoom(factor: number): void {
    this.whole = false;
    this.viewer.viewport.zoomBy(factor, undefined, calm());
  }

  /** Shows what another map shows, in shares of the whole. */
  follow(leader: DeepMap): void {
    if (!leader.viewer.isOpen() || !this.viewer.isOpen()) return;
    if (leader.whole) {
      if (!this.whole) this.home(true);
      return;
    }
    this.whole = false;
    const bounds = leader.viewer.viewport.getBounds(true);
    const now = this.viewer.viewport.getBounds(true);
    const near = Math.abs(now.x - bounds.x) + Math.abs(now.y - bounds.y) + Math.abs(now.width - bounds.width);
    if (near > 1e-6 * bounds.width) this.viewer.viewport.fitBounds(bounds, true);
  }

  /** The level whose tiles are seen. */
  get level(): number {
    if (!this.picture || !this.viewer.isOpen()) return 0;
    const needed = Math.ceil(-Math.log2(this.axes().step * (window.devicePixelRatio || 1)) - 1e-9);
    return Math.max(0, Math.min(this.picture.info.max_level, this.picture.info.max_level - needed));
  }

  private source(picture: Picture): object {
    const { info } = picture;
    const generation = this.generation;
    const bounds = (level: number, x: number, y: number, isSource?: boolean): OpenSeadragon.Rect => {
      const { rows, cols } = tileBlock(info, level, x, y);
      if (isSource) return new OpenSeadragon.Rect(0, 0, cols, rows);
      const share = perPixel(info, level) / info.n_k;
      return new OpenSeadragon.Rect(x * info.tile * share, y * info.tile * share, cols * share, rows * share);
    };
    return {
      width: info.n_k,
      height: info.n_q,
      tileSize: info.tile,
      minLevel: 0,
      maxLevel: info.max_level,
      getTileBounds: bounds,
      getTileUrl: (level: number, x: number, y: number) => `${level}/${x}/${y}`,
      getTileHashKey: (level: number, x: number, y: number) => `${generation}/${level}/${x}/${y}`,
      downloadTileStart: (job: TileJob) => {
        const { level, x, y } = job.tile;
        picture.pixels(level, x, y).then(
          (pixels) => {
            const context = painted(pixels);
            if (!pixels.whole && generation === this.generation) this.unfinished.set(job.tile, context);
            job.finish(context, null, "context2d");
          },
          (error: Error) => job.fail(error.message, null),
        );
      },
      downloadTileAbort: () => {},
    };
  }

  /** Where cell (0, 0) begins and how wide a cell is, in pixels of the stage. */
  private axes(): { x: number; y: number; step: number } {
    const { viewport } = this.viewer;
    const origin = viewport.pixelFromPoint(new OpenSeadragon.Point(0, 0), true);
    const width = viewport.deltaPixelsFromPoints(new OpenSeadragon.Point(1, 0), true).x;
    return { x: origin.x, y: origin.y, step: width / (this.picture?.info.n_k ?? 1) };
  }

  private cellAt(x: number, y: number): Cell | null {
    if (!this.picture || !this.viewer.isOpen()) return null;
    const axes = this.axes();
    const [i, j] = [Math.floor((y - axes.y) / axes.step), Math.floor((x - axes.x) / axes.step)];
    const { n_q, n_k } = this.picture.info;
    return i >= 0 && j >= 0 && i < n_q && j < n_k ? { i, j } : null;
  }

  private point(cell: Cell | null): void {
    if (cell?.i === this.pointed?.i && cell?.j === this.pointed?.j) return;
    this.mark(cell);
    this.options.onPoint(cell);
    this.element.dispatchEvent(new CustomEvent(CELL, { bubbles: true, detail: cell }));
  }

  private key(event: KeyboardEvent): void {
    if (!this.picture || event.ctrlKey || event.metaKey || event.altKey) return;
    const { n_q, n_k } = this.picture.info;
    const at = this.chosen ?? { i: n_q - 1, j: 0 };
    const far = event.shiftKey ? 10 : 1;
    const moves: Record<string, () => void> = {
      ArrowLeft: () => this.step({ i: at.i, j: Math.max(0, at.j - far) }),
      ArrowRight: () => this.step({ i: at.i, j: Math.min(n_k - 1, at.j + far) }),
      ArrowUp: () => this.step({ i: Math.max(0, at.i - far), j: at.j }),
      ArrowDown: () => this.step({ i: Math.min(n_q - 1, at.i + far), j: at.j }),
      "+": () => this.zoom(1.6),
      "=": () => this.zoom(1.6),
      "-": () => this.zoom(1 / 1.6),
      "0": () => this.home(),
      Enter: () => this.reveal(at, ROOM_FOR_NUMBERS + 2),
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    move();
  }

  private step(cell: Cell): void {
    this.options.onPick(cell);
    const axes = this.axes();
    const [x, y] = [axes.x + (cell.j + 0.5) * axes.step, axes.y + (cell.i + 0.5) * axes.step];
    if (x < 0 || y < 0 || x > this.stage.clientWidth || y > this.stage.clientHeight) this.reveal(cell);
  }

  private drawNow(): void {
    if (!this.picture || !this.viewer.isOpen() || !this.element.isConnected) return;
    const { n_q, n_k } = this.picture.info;
    const axes = this.axes();
    const cross = this.pointed ?? this.chosen;
    // Of a cell of 96 pixels and 100,000 tokens an element would be too large: only what is seen has a ground.
    const [left, top] = [Math.max(0, axes.x), Math.max(0, axes.y)];
    this.ground.style.transform = `translate(${left}px, ${top}px)`;
    this.ground.style.width = `${Math.max(0, Math.min(this.stage.clientWidth, axes.x + n_k * axes.step) - left)}px`;
    this.ground.style.height = `${Math.max(0, Math.min(this.stage.clientHeight, axes.y + n_q * axes.step) - top)}px`;
    drawRuler(
      this.left,
      { start: axes.y, step: axes.step, n: n_q, tokens: this.tokens.query, marked: cross?.i ?? -1 },
      true,
      this.draw,
    );
    drawRuler(
      this.top,
      { start: axes.x, step: axes.step, n: n_k, tokens: this.tokens.key, marked: cross?.j ?? -1 },
      false,
      this.draw,
    );
    const start = axes.y + this.stage.clientTop;
    this.sinks.draw(this.picture, this.level, { start, step: axes.step, marked: cross?.i ?? -1 });
    const ends = [
      axes.x + n_k * axes.step - this.stage.clientWidth,
      axes.y + n_q * axes.step - this.stage.clientHeight,
    ];
    this.stage.classList.toggle("all", Math.max(-axes.x, -axes.y, ...ends) < 1);
    const context = fitted(this.overlay);
    const { marks } = this.options;
    if (marks)
      drawMarks(context, axes, marks, this.picture.info, getComputedStyle(this.overlay).getPropertyValue("--cross"));
    if (axes.step >= ROOM_FOR_NUMBERS) this.drawNumbers(context, axes);
    if (this.chosen) this.outline(context, axes, this.chosen, true);
    if (this.pointed) this.outline(context, axes, this.pointed, false);
    this.spareMinimap(context);
  }

  /** Draws nothing over the minimap, which lies below this. */
  private spareMinimap(context: CanvasRenderingContext2D): void {
    const minimap = this.stage.querySelector(":scope:not(.all) .navigator")?.getBoundingClientRect();
    const own = this.overlay.getBoundingClientRect();
    if (minimap) context.clearRect(minimap.left - own.left, minimap.top - own.top, minimap.width, minimap.height);
  }

  private outline(
    context: CanvasRenderingContext2D,
    axes: { x: number; y: number; step: number },
    cell: Cell,
    chosen: boolean,
  ): void {
    const style = getComputedStyle(this.overlay);
    const [x, y] = [axes.x + cell.j * axes.step, axes.y + cell.i * axes.step];
    const size = Math.max(axes.step, 6);
    const [left, up] = [x + axes.step / 2 - size / 2, y + axes.step / 2 - size / 2];
    if (!chosen) {
      context.fillStyle = style.getPropertyValue("--cross");
      context.fillRect(0, y + axes.step / 2 - 0.5, this.overlay.clientWidth, 1);
      context.fillRect(x + axes.step / 2 - 0.5, 0, 1, this.overlay.clientHeight);
    }
    context.lineWidth = chosen ? 4 : 3;
    context.strokeStyle = "#0008";
    context.strokeRect(left, up, size, size);
    context.lineWidth = chosen ? 2.5 : 1.5;
    context.strokeStyle = style.getPropertyValue(chosen ? "--mark" : "--cross-edge");
    context.strokeRect(left, up, size, size);
  }

  private drawNumbers(context: CanvasRenderingContext2D, axes: { x: number; y: number; step: number }): void {
    const picture = this.picture as Picture;
    const { n_q, n_k } = picture.info;
    const style = getComputedStyle(this.overlay);
    const i1 = Math.min(n_q, Math.ceil((this.overlay.clientHeight - axes.y) / axes.step));
    const j1 = Math.min(n_k, Math.ceil((this.overlay.clientWidth - axes.x) / axes.step));
    context.font = `11px ${style.getPropertyValue("--mono")}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineWidth = 3;
    for (let i = Math.max(0, Math.floor(-axes.y / axes.step)); i < i1; i++) {
      for (let j = Math.max(0, Math.floor(-axes.x / axes.step)); j < j1; j++) {
        const value = picture.exact(i, j, this.draw);
        if (value === undefined || Number.isNaN(value)) continue;
        const [x, y] = [axes.x + (j + 0.5) * axes.step, axes.y + (i + 0.5) * axes.step];
        const text = short(value);
        context.strokeStyle = style.getPropertyValue("--halo");
        context.strokeText(text, x, y);
        context.fillStyle = style.getPropertyValue(Math.abs(value) < FAINT ? "--ink-soft" : "--ink");
        context.fillText(text, x, y);
      }
    }
  }
}

/** How OpenSeadragon shows a map. */
const viewerOptions = (element: HTMLElement, minimap: boolean): OpenSeadragon.Options =>
  ({
    element,
    drawer: "canvas",
    imageSmoothingEnabled: false,
    minPixelRatio: 1, // a pixel of a tile is never smaller than one of the screen: nothing falls between them
    maxZoomPixelRatio: WIDEST_CELL,
    minZoomImageRatio: 0.7,
    visibilityRatio: 0.3,
    animationTime: calm() ? 0 : 0.35,
    springStiffness: 9,
    zoomPerScroll: 1.35,
    imageLoaderLimit: 6,
    maxImageCacheCount: 160,
    maxTilesPerFrame: 8,
    showNavigationControl: false,
    showNavigator: minimap,
    navigatorPosition: "TOP_RIGHT",
    navigatorSizeRatio: 0.16,
    navigatorAutoFade: false,
    navigatorOpacity: 1,
    navigatorBackground: "transparent",
    navigatorBorderColor: "transparent",
    navigatorDisplayRegionColor: "#e0872c",
    keyboardNavEnabled: false,
    tabIndex: -1,
    gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
    gestureSettingsTouch: { clickToZoom: false, dblClickToZoom: true },
    gestureSettingsPen: { clickToZoom: false },
  }) as OpenSeadragon.Options;

function painted(pixels: Pixels): CanvasRenderingContext2D {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [pixels.cols, pixels.rows];
  const context = canvas.getContext("2d") as CanvasRenderingContext2D;
  paint(context, pixels);
  return context;
}

function paint(context: CanvasRenderingContext2D, { rows, cols, data }: Pixels): void {
  context.putImageData(new ImageData(new Uint8ClampedArray(data.buffer as ArrayBuffer), cols, rows), 0, 0);
}
