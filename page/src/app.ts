import { Data, placeIn, type Finding, type More, type Scene, type Settings, type Words } from "./data";
import { h, redraw, reveal } from "./dom";
import { isDark, keepKeys, watchTheme } from "./host";
import { shortened } from "./numbers/format";
import { inside } from "./numbers/windows";
import { Editor, type Typing } from "./parts/editor";
import { Handover } from "./parts/handover";
import { buttons, choices, tabsOf, type Theme } from "./parts/header";
import { lightTokens } from "./parts/lit";
import { Notice } from "./parts/notice";
import { glossary, lineOf, withTerms } from "./parts/terms";
import { Tour } from "./parts/tour";
import { WorkingLine } from "./parts/working";
import { ShareMenu } from "./share/menu";
import { Gone, type Source } from "./source/source";
import { fromHash, settingsFor, settingsIn, START, Store, typedOf, type State, type Way } from "./state";
import { absentView } from "./views/absent";
import { ablationView } from "./views/ablation";
import { arcsView } from "./views/arcs";
import { compareView } from "./views/compare";
import { headsView } from "./views/heads";
import { mapView } from "./views/map";
import { onPictureView } from "./views/onpicture";
import { overviewView } from "./views/overview";
import { profilesView } from "./views/profiles";
import { scaleView } from "./views/scale";
import { stepsView } from "./views/steps";
import { textView } from "./views/text";
import { tokenView } from "./views/token";
import {
  chosenQuery,
  EVERYTHING,
  headAt,
  scaleName,
  touches,
  type Context,
  type MakeView,
  type View,
  sameTokens,
} from "./views/view";

const VIEWS: Record<string, readonly [title: string, make: MakeView]> = {
  overview: ["Overview", overviewView],
  heads: ["Heads", headsView],
  map: ["Map", mapView],
  text: ["Text", textView],
  token: ["One token", tokenView],
  compare: ["Compare", compareView],
  profiles: ["Profiles", profilesView],
  scale: ["Scale", scaleView],
  steps: ["Step by step", stepsView],
  ablation: ["Does it matter?", ablationView],
  arcs: ["Arcs", arcsView],
  picture: ["On the picture", onPictureView],
};

/** Views that need no chosen key to begin with. */
const WITHOUT_KEY: ReadonlySet<string> = new Set(["heads", "profiles", "token", "ablation", "arcs"]);

const KEYS = [
  ["1 … 9", "the views, in order"],
  ["[ ]", "the head before, the head after"],
  ["{ }", "the layer before, the layer after"],
  ["← ↑ → ↓", "move the chosen pair or token (in the map and the text); with Shift ten at once"],
  ["+ − 0", "zoom the map; show all of it"],
  ["Enter", "go to the chosen pair"],
  ["s", "save and share: a link, the page, pictures, numbers"],
  ["t", "light or dark"],
  ["?", "this list"],
];

/** The titles of the views that a scene has. */
function titlesOf({ grids = [] }: Scene): Record<string, string> {
  const heard = grids.length > 0 && grids.every(({ kind }) => kind === "sound");
  const titles = Object.entries(VIEWS).map(([id, [title]]) => [
    id,
    id === "picture" && heard ? "Along the sound" : title,
  ]);
  return Object.fromEntries(titles.filter(([id]) => id !== "picture" || grids.length));
}

/** The page: what is chosen above, a view below. */
export class App {
  readonly element = h("div", { class: "regard" });
  private readonly data: Data;
  private readonly header = h("header", {});
  private readonly tabs = h("nav", { "aria-label": "Views" });
  private readonly main = h("main", {});
  private readonly problem = h("div", { class: "problem banner", role: "alert", hidden: true });
  private readonly notice = new Notice();
  private readonly working = new WorkingLine();
  private readonly spoken = h("p", { class: "spoken", "aria-live": "polite" });
  private readonly note = h("span", {});
  private readonly caveat = h("span", {});
  private readonly line = h("p", { class: "said" });
  private readonly help = h("dialog", { "aria-label": "Keys and glossary" });
  private context: Context | null = null;
  private readonly share = new ShareMenu(() => this.context);
  private readonly findings = new Map<string, Finding>();
  private words!: Words;
  private tour: Tour | null = null;
  /** The scene that the tour is about. */
  private home = "";
  private walking = false;
  private readonly system = matchMedia("(prefers-color-scheme: dark)");
  private scenes: Scene[] = [];
  private view: View | null = null;
  /** The name of the view that is shown. */
  private mounted = "";
  private readonly handover: Handover;
  /** What changed and was then put right, so that no view has been told. */
  private readonly unseen = new Set<keyof State>();
  /** How many views there were: what goes wrong in one that is gone is nobody's business. */
  private views = 0;
  private editor: Editor | null = null;
  /** The scene whose place another text takes: what is still asked of it is nobody's business. */
  private leaving = "";
  private theme: Theme = "auto";
  /** Whether a link led here, asked before the theme writes the address. */
  private readonly linked = location.hash !== "";
  private readonly endings: (() => void)[] = [];

  constructor(
    source: Source,
    private readonly store: Store,
    /** Where in a page of somebody else this is; null: the document is this page, and keys are meant for it. */
    private readonly host: HTMLElement | null,
  ) {
    this.data = new Data(source);
    this.handover = new Handover(this.main, () => this.data.settled());
    this.element.dataset.source = source.kind;
    source.progress = (working) => this.working.show(working);
    this.element.append(
      h("button", { type: "button", class: "skip", click: () => this.skip() }, "Skip to the view"),
      this.header,
      this.tabs,
      this.problem,
      this.notice.element,
      this.working.element,
      this.main,
      h("footer", {}, this.caveat, this.note),
      this.spoken,
      this.help,
      this.share.element,
    );
    lightTokens(this.main, () => sameTokens(this.scene.layers[this.store.state.layer]));
    this.dress();
    this.system.addEventListener("change", this.dress);
    if (host) {
      this.endings.push(watchTheme(this.dress));
      this.element.addEventListener("keydown", keepKeys);
    }
    (host ? this.element : document).addEventListener("keydown", this.key);
    this.element.classList.add(host ? "cell" : "page");
    this.element.tabIndex = -1;
  }

  /** Shows what there is to see; resolves to whether anything is. */
  async start(): Promise<boolean> {
    try {
      const [{ title, version, engine, scenes, start }, words] = await Promise.all([
        this.data.scenes(),
        this.data.words(),
      ]);
      this.scenes = scenes;
      this.words = words;
      const attempt = (): void => this.store.set({ view: "ablation" });
      this.caveat.replaceChildren(
        words.caveat,
        " ",
        h("button", { type: "button", class: "link", click: attempt }, "Switch a head off"),
      );
      if (!this.help.childElementCount) fillHelp(this.help, words);
      const { note } = this.data.source;
      this.note.textContent = `${title} ${version}, engine ${engine}${note ? `; ${note}` : ""}`;
      if (start && !this.linked) this.store.set(fromHash(start), "refine");
      else if (!this.linked && this.store.state.view === START.view && scenes[0]?.grids?.length)
        this.store.set({ view: "picture" }, "refine");
      if (!scenes.length) throw new Error("There is nothing to look at here.");
      if (this.store.state.tour) await this.walk(this.store.state.tour);
      await this.find(this.store.state);
      if (this.lacks(this.store.state)) await this.recall(this.store.state);
      else this.store.set(this.within(this.store.state), "refine");
      this.store.listen((state, changed, way) => this.update(state, changed, way));
      for (const key of EVERYTHING) this.unseen.add(key);
      this.show();
      return true;
    } catch (error) {
      this.fail(error);
      return false;
    }
  }

  destroy(): void {
    this.view?.destroy?.();
    for (const end of this.endings) end();
    this.system.removeEventListener("change", this.dress);
    document.removeEventListener("keydown", this.key);
  }

  private get scene(): Scene {
    return this.sceneOf(this.store.state.scene) ?? this.scenes[0];
  }

  private sceneOf(name: string): Scene | undefined {
    return this.scenes.find((scene) => scene.id === name.split(":")[0]);
  }

  /** Whether a link is to a scene that is not here, or is another than when the link was made. */
  private lacks(state: State): boolean {
    const scene = this.sceneOf(state.scene);
    if (!settingsIn(state)) return !scene && state.scene !== "";
    const here = scene && typedOf(scene);
    return !here || (Object.keys(here) as (keyof typeof here)[]).some((key) => here[key] !== state[key]);
  }

  /** Follows a link to a scene that is not here: runs its text again, or says what is shown instead. */
  private async recall(state: State): Promise<void> {
    const settings = settingsIn(state);
    const model = this.scenes.find(({ editable }) => editable);
    let shown = this.within({ ...state, scene: "", ...typedOf(undefined) });
    let reason = "";
    if (settings && model) {
      try {
        const scene = await this.data.run(model.id, settingsFor(model, settings), "", state.other.split("/")[0]);
        this.scenes = (await this.data.scenes()).scenes;
        shown = this.within({ ...state, scene: scene.id });
        this.store.set({ ...state, ...shown }, "refine");
        return;
      } catch (error) {
        reason = ` (${error instanceof Error ? error.message : String(error)})`;
      }
    }
    this.store.set({ ...state, ...shown, i: -1, j: -1, zoom: "" }, "refine");
    const lost = settings ? `“${shortened(settings.text)}”` : state.scene;
    this.notice.show(
      `This link is to a text that is not here, ${lost}${reason}. Instead, this is “${this.scene.name}”.`,
    );
  }

  /** The state with what is not there replaced by what is. */
  private within(state: State): Partial<State> {
    const shown = this.nameOf(state);
    const scene = this.sceneOf(shown) as Scene;
    const { layers } = scene;
    const found = free(state) ? this.findings.get(shown) : undefined;
    const layer = inside(Math.trunc(found?.layer ?? state.layer), layers.length);
    return {
      scene: shown,
      view: Object.hasOwn(VIEWS, state.view) ? state.view : START.view,
      layer,
      head: inside(Math.trunc(found?.head ?? state.head), layers[layer].heads),
      ...typedOf(scene),
      ...(shown === state.scene || !state.scene ? {} : { i: -1, j: -1 }),
      ...(found && { i: found.i ?? -1, j: found.j ?? -1 }),
    };
  }

  /** Brings the finding of the scene, where the head is left to it. */
  private async find(state: State): Promise<void> {
    const name = this.nameOf(state);
    if (!free(state) || this.findings.has(name)) return;
    const none = { layer: 0, head: 0, i: -1, how: "" };
    this.findings.set(name, await this.data.finding(name).catch(() => none));
  }

  /** The scene that is shown in a state, and its batch element. */
  private nameOf(state: State): string {
    const named = this.sceneOf(state.scene);
    const b = Number(state.scene.split(":")[1] ?? "0");
    return named && Number.isInteger(b) && b >= 0 && b < named.batch ? state.scene : (named ?? this.scenes[0]).id;
  }

  private update(state: State, latest: ReadonlySet<keyof State>, way: Way): void {
    for (const key of latest) this.unseen.add(key);
    if (latest.has("dark")) this.unseen.add("scale"); // what is drawn is drawn in the colours of the theme
    if (latest.has("tour") && !this.walking) {
      if (state.tour) {
        void this.walk(state.tour).catch((error: unknown) => this.fail(error));
        return;
      }
      this.tour?.end();
    }
    if (way === "link" && this.lacks(state)) {
      void this.recall(state);
      return;
    }
    if (free(state) && !this.findings.has(this.nameOf(state))) {
      void this.find(state).then(() => this.store.state === state && this.update(state, new Set(), way));
      return;
    }
    const sound = this.within(state);
    if (Object.entries(sound).some(([key, value]) => state[key as keyof State] !== value)) {
      this.store.set(sound, "refine");
      return;
    }
    if (latest.has("scene") && way === "step") this.notice.hide();
    this.show();
  }

  /** Shows what changed, once the key that a query looks at most is known, where no other was chosen. */
  private show(): void {
    const { state } = this.store;
    const [at, i] = [headAt(state), chosenQuery(state, this.scene.layers[state.layer])];
    if (state.j < 0 && !WITHOUT_KEY.has(state.view) && !this.scene.held && this.data.knownPeak(at, i) === undefined) {
      const { id } = this.scene;
      void this.data.peak(at, i).then(
        () => this.store.state === state && this.show(),
        (error: unknown) => this.store.state === state && this.leaving !== id && this.fail(error),
      );
      return;
    }
    const changed = new Set(this.unseen);
    this.unseen.clear();
    if (state.j < 0 && touches(changed, "scene", "layer", "head", "i")) changed.add("j");
    if (!this.view || touches(changed, "view", "scene", "type")) this.mount();
    else {
      this.clear();
      if (touches(changed, "layer", "head")) this.drawHeader();
      if (touches(changed, "scale", "layer") || this.scene.kind === "words") this.drawLine();
      this.view.update(state, changed);
    }
    this.tour?.point(this.element, state);
  }

  /** Goes to a step of the tour: what it shows, and what it says. */
  private async walk(number: number): Promise<void> {
    const here = this.sceneOf(this.store.state.scene);
    if (this.toured(here).held) return this.store.set({ tour: 0 }, "refine");
    if (!this.tour?.element.isConnected || !this.home) this.home = this.toured(here).id;
    const { editable } = this.sceneOf(this.home) ?? this.scenes[0];
    const steps = (await this.data.tour(this.home)).filter(
      ({ settings, state }) => editable || (!settings && !state.type),
    );
    const at = Math.max(1, Math.min(steps.length, Math.trunc(number)));
    const { state, settings } = steps[at - 1];
    const scene = settings ? (await this.made(this.home, settings)).id : this.home;
    this.walking = true;
    this.store.set({ tour: at, ...state, scene });
    this.walking = false;
    this.tour ??= new Tour(this.words, (step) => this.store.set({ tour: step }));
    if (!this.tour.element.isConnected) this.tabs.after(this.tour.element);
    this.tour.show(steps, at);
    this.tour.point(this.element, this.store.state);
  }

  /** What is said of the head and the token that a sentence is opened on, in every view. */
  private opened(state: State): string | undefined {
    const found = this.findings.get(state.scene);
    const there = found?.i === state.i && found.layer === state.layer && found.head === state.head;
    return there ? found.why : undefined;
  }

  /** The scene of the tour: the one that is shown, unless it was typed, or is a sentence and the example is here. */
  private toured(here: Scene | undefined): Scene {
    const example = this.scenes.find(({ editable, given }) => editable && given);
    if (here?.kind === "words") return example ?? here;
    return (here && !/^example-\d+$/.test(here.id) ? here : example) ?? this.scenes[0];
  }

  private drawLine(): void {
    const { state } = this.store;
    const dark = scaleName(state) !== "ink";
    const sink = this.scene?.layers[state.layer]?.sink;
    const line = this.opened(state) ?? lineOf(state.view, this.words, dark, sink);
    redraw(this.line, ...(this.view?.line?.() ?? withTerms(line, this.words)));
  }

  private mount(): void {
    const { state } = this.store;
    this.clear();
    const { scene } = this;
    if (this.leaving !== scene.id) this.leaving = "";
    this.drawHeader();
    const mine = ++this.views;
    const context: Context = {
      data: this.data,
      store: this.store,
      scenes: this.scenes,
      scene,
      words: this.words,
      fail: (error) => mine === this.views && this.leaving !== scene.id && this.fail(error),
      say: (text) => (this.spoken.textContent = text),
    };
    this.context = context;
    const before = this.view;
    this.view = (scene.held && state.view !== "picture" ? absentView : VIEWS[state.view][1])(context);
    // A server takes a while: while one types, what was there stays in sight until its answers are.
    const typing = state.type && this.mounted === state.view && this.data.source.kind !== "file";
    if (before && typing) this.handover.keep(before, this.view);
    else this.handover.replace(before, this.view, this.line);
    this.mounted = state.view;
    this.drawLine();
    if (state.type && this.scene.editable) {
      // A file runs the model at once; a server is not to be asked for every letter.
      const pause = this.data.source.kind === "file" ? 50 : undefined;
      this.editor ??= new Editor(this.scene, (run) => this.run(run), pause);
      if (!this.editor.element.isConnected) this.main.before(this.editor.element);
      this.editor.show(this.scene);
    } else this.editor?.element.remove();
    if (!this.host) document.title = `${VIEWS[state.view][0]} · regard`;
    this.view.update(state, EVERYTHING);
  }

  private drawHeader(): void {
    const { store, scenes, scene } = this;
    const acts = {
      ...(!scene.held && { tour: () => store.set({ tour: 1 }) }),
      share: () => this.share.open(),
      turn: () => this.turn(),
      help: () => this.openHelp(),
    };
    redraw(
      this.header,
      h("h1", {}, "regard"),
      ...choices(store, scenes, scene),
      ...buttons(store, this.typedIn(), this.theme, acts),
    );
    redraw(this.tabs, ...tabsOf(store, titlesOf(scene)));
    const current = this.tabs.querySelector("[aria-current]");
    if (current) reveal(this.tabs, current);
  }

  /** The scene whose text can be changed: the one that is shown, or of a sentence the example beside it. */
  private typedIn(): Scene | undefined {
    if (this.scene.editable) return this.scene;
    return this.scene.kind === "words" ? this.scenes.find(({ editable }) => editable) : undefined;
  }

  /** Opens the help at its beginning: a dialog gives the focus to its first button, which is its last line. */
  private openHelp(): void {
    this.help.showModal();
    this.help.scrollTop = 0;
  }

  /** Runs the model on what was typed. What is refined, a text still being typed, gives its place up. */
  private async run({ settings, stage, refines, more, isLatest }: Typing): Promise<Scene> {
    const before = this.scene.id;
    let after = before;
    this.leaving = before;
    try {
      const scene = await this.made(before, settings, stage, more);
      if (!isLatest()) return scene;
      after = scene.id;
      const { layers } = scene;
      const { i, j } = this.store.state;
      const kept = (axis: "query" | "key", size: number, at: number): Promise<number> =>
        placeIn(this.data.tokens(scene.id, axis), size, this.data.tokens(before, axis), at);
      const places = [kept("query", layers[0].n_q, i), kept("key", layers[0].n_k, j)];
      const [query, key] = await Promise.all(places);
      if (!isLatest()) return scene;
      this.store.set({ scene: after, i: query, j: key, zoom: "" }, refines ? "refine" : "step");
      return scene;
    } finally {
      if (after === before && isLatest()) this.leaving = "";
    }
  }

  /** The scene of a run of a model; one that is compared stays. */
  private async made(of: string, settings: Settings, stage = "", more?: More): Promise<Scene> {
    const scene = await this.data.run(of, settings, stage, this.store.state.other.split(/[:/]/)[0], more);
    this.scenes = (await this.data.scenes()).scenes; // the last few texts that were typed stay, to be compared
    return scene;
  }

  /** Goes past what is the same in all views, and past the terms of the line above it. */
  private skip(): void {
    const place = this.view?.element ?? this.main;
    place.tabIndex = -1;
    place.focus();
  }

  /** Whether what is around the page is dark. */
  private around(): boolean {
    return this.host ? isDark(this.host) : this.system.matches;
  }

  private readonly dress = (): void => {
    const dark = this.theme === "dark" || (this.theme === "auto" && this.around());
    const theme = dark ? "dark" : "light";
    if (this.element.dataset.theme === theme) return;
    this.element.dataset.theme = theme;
    this.store.set({ dark }, "refine");
  };

  /** The other theme than is seen, of its own only where it differs from what is around the page. */
  private turn(): void {
    const dark = !this.store.state.dark;
    this.theme = dark === this.around() ? "auto" : dark ? "dark" : "light";
    this.dress();
    this.drawHeader();
  }

  private readonly key = (event: Event): void => {
    if (!(event instanceof KeyboardEvent)) return;
    const target = event.target as HTMLElement; // which may be in a dialog that has closed but not given back the focus
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, textarea, select, dialog[open]"))
      return;
    const { layer, head } = this.store.state;
    const layers = this.scene.layers;
    const keys: Record<string, () => void> = {
      "[": () => this.store.set({ head: Math.max(0, head - 1) }),
      "]": () => this.store.set({ head: Math.min(layers[layer].heads - 1, head + 1) }),
      "{": () => this.store.set({ layer: Math.max(0, layer - 1) }),
      "}": () => this.store.set({ layer: Math.min(layers.length - 1, layer + 1) }),
      s: () => this.share.open(),
      t: () => this.turn(),
      "?": () => this.openHelp(),
    };
    Object.keys(VIEWS)
      .slice(0, 9)
      .forEach((view, k) => (keys[String(k + 1)] = () => this.store.set({ view })));
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };

  private fail(error: unknown): void {
    const message = error instanceof Error ? error.message : String(error);
    const again = h(
      "button",
      { type: "button", click: () => (this.scenes.length ? this.mount() : void this.start()) },
      "Try again",
    );
    this.problem.replaceChildren(h("span", {}, message), again);
    this.problem.classList.toggle("gone", error instanceof Gone);
    this.problem.hidden = false;
    this.working.show({ share: 1 });
  }

  private clear(): void {
    this.problem.hidden = true;
  }
}

/** Whether the head is left to the scene's finding: a link that names a token but no head means the first. */
const free = ({ layer, head, i, j }: State): boolean => layer < 0 && head < 0 && i < 0 && j < 0;

function fillHelp(dialog: HTMLDialogElement, words: Words): void {
  dialog.append(
    h("h2", { tabindex: -1, autofocus: true }, "Keys"),
    h("dl", {}, ...KEYS.flatMap(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
    glossary(words),
    h("button", { type: "button", click: () => dialog.close() }, "Close"),
  );
}
