import { Data, type Scene, type Settings } from "./data";
import { choice, h } from "./dom";
import { isDark, keepKeys, watchTheme } from "./host";
import { count, shortened } from "./numbers/format";
import { Editor } from "./parts/editor";
import { Notice } from "./parts/notice";
import { ShareMenu } from "./share/menu";
import { Gone, type Source } from "./source/source";
import { settingsIn, Store, typedOf, type State, type Way } from "./state";
import { arcsView } from "./views/arcs";
import { compareView } from "./views/compare";
import { headsView } from "./views/heads";
import { mapView } from "./views/map";
import { profilesView } from "./views/profiles";
import { stepsView } from "./views/steps";
import { textView } from "./views/text";
import { EVERYTHING, type Context, type MakeView, type View } from "./views/view";

const VIEWS: Record<string, readonly [title: string, make: MakeView]> = {
  heads: ["Heads", headsView],
  map: ["Map", mapView],
  text: ["Text", textView],
  compare: ["Compare", compareView],
  profiles: ["Profiles", profilesView],
  steps: ["Step by step", stepsView],
  arcs: ["Arcs", arcsView],
};

const CAVEAT = "Attention shows where a head reads from. It does not by itself explain why a model answers as it does.";

const KEYS = [
  ["1 … 7", "the views, in order"],
  ["[ ]", "the head before, the head after"],
  ["{ }", "the layer before, the layer after"],
  ["← ↑ → ↓", "move the chosen pair or token (in the map and the text); with Shift ten at once"],
  ["+ − 0", "zoom the map; show all of it"],
  ["Enter", "go to the chosen pair"],
  ["s", "save and share: a link, the page, pictures, numbers"],
  ["t", "light, dark, or as the system has it"],
  ["?", "this list"],
];

const THEMES = ["auto", "light", "dark"] as const;

/** The page: what is chosen above, a view below. */
export class App {
  readonly element = h("div", { class: "regard" });
  private readonly data: Data;
  private readonly header = h("header", {});
  private readonly tabs = h("nav", { "aria-label": "Views" });
  private readonly main = h("main", {});
  private readonly problem = h("div", { class: "problem banner", role: "alert", hidden: true });
  private readonly notice = new Notice();
  private readonly working = h("p", { class: "working", role: "status", hidden: true });
  private readonly spoken = h("p", { class: "spoken", "aria-live": "polite" });
  private readonly note = h("span", {});
  private readonly help = helpDialog();
  private context: Context | null = null;
  private readonly share = new ShareMenu(() => this.context);
  private readonly system = matchMedia("(prefers-color-scheme: dark)");
  private scenes: Scene[] = [];
  private view: View | null = null;
  /** What changed and was then put right, so that no view has been told. */
  private readonly unseen = new Set<keyof State>();
  /** How many views there were: what goes wrong in one that is gone is nobody's business. */
  private views = 0;
  private editor: Editor | null = null;
  private theme: (typeof THEMES)[number] = "auto";
  private readonly endings: (() => void)[] = [];

  constructor(
    source: Source,
    private readonly store: Store,
    /** Where in a page of somebody else this is; null: the document is this page, and keys are meant for it. */
    private readonly host: HTMLElement | null,
  ) {
    this.data = new Data(source);
    this.element.dataset.source = source.kind;
    source.progress = (share) => {
      this.working.hidden = share !== null && share >= 1;
      this.working.textContent =
        share === null ? "Waiting for the kernel …" : `Summing over all pairs: ${Math.round(100 * share)} %`;
    };
    this.element.append(
      h("button", { type: "button", class: "skip", click: () => this.skip() }, "Skip to the view"),
      this.header,
      this.tabs,
      this.problem,
      this.notice.element,
      this.working,
      this.main,
      h("footer", {}, h("span", {}, CAVEAT), this.note),
      this.spoken,
      this.help,
      this.share.element,
    );
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

  async start(): Promise<void> {
    try {
      const { title, version, engine, scenes } = await this.data.scenes();
      this.scenes = scenes;
      const { note } = this.data.source;
      this.note.textContent = `${title} ${version}, engine ${engine}${note ? `; ${note}` : ""}`;
      if (!scenes.length) throw new Error("There is nothing to look at here.");
      if (this.lacks(this.store.state)) await this.recall(this.store.state);
      else this.store.set(this.within(this.store.state), "refine");
      this.store.listen((state, changed, way) => this.update(state, changed, way));
      this.mount();
    } catch (error) {
      this.fail(error);
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
    const settings = settingsIn(state);
    if (!settings) return !scene && state.scene !== "";
    const here = scene && typedOf(scene);
    return !here || (Object.keys(here) as (keyof Settings)[]).some((key) => here[key] !== settings[key]);
  }

  /** Follows a link to a scene that is not here: runs its text again, or says what is shown instead. */
  private async recall(state: State): Promise<void> {
    const settings = settingsIn(state);
    const model = this.scenes.find((scene) => scene.editable);
    let shown = this.within({ ...state, scene: "", ...typedOf(undefined) });
    let reason = "";
    if (settings && model) {
      try {
        const scene = await this.data.run(model.id, settings, "", state.other.split("/")[0]);
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
    this.notice.show(`This link is to a text that is not here, ${lost}${reason}. Instead, this is “${this.scene.name}”.`);
  }

  /** The state with what is not there replaced by what is. */
  private within(state: State): Partial<State> {
    const found = this.sceneOf(state.scene);
    const b = Number(state.scene.split(":")[1] ?? "0");
    const scene = found && Number.isInteger(b) && b >= 0 && b < found.batch ? found : undefined;
    const { id, layers } = scene ?? found ?? this.scenes[0];
    const layer = Math.max(0, Math.min(layers.length - 1, Math.trunc(state.layer)));
    return {
      scene: scene ? state.scene : id,
      view: Object.hasOwn(VIEWS, state.view) ? state.view : "heads",
      layer,
      head: Math.max(0, Math.min(layers[layer].heads - 1, Math.trunc(state.head))),
      ...typedOf(scene ?? found ?? this.scenes[0]),
      ...(scene || !state.scene ? {} : { i: -1, j: -1 }),
    };
  }

  private update(state: State, latest: ReadonlySet<keyof State>, way: Way): void {
    if (way === "link" && this.lacks(state)) {
      void this.recall(state);
      return;
    }
    const sound = this.within(state);
    if (Object.entries(sound).some(([key, value]) => state[key as keyof State] !== value)) {
      for (const key of latest) this.unseen.add(key);
      this.store.set(sound, "refine");
      return;
    }
    const changed = new Set([...latest, ...this.unseen]);
    this.unseen.clear();
    if (latest.has("scene") && way === "step") this.notice.hide();
    if (changed.has("view") || changed.has("scene") || changed.has("type")) this.mount();
    else {
      this.clear();
      if (changed.has("layer") || changed.has("head")) this.drawHeader();
      this.view?.update(state, changed);
    }
  }

  private mount(): void {
    const { state } = this.store;
    this.clear();
    this.view?.destroy?.();
    this.drawHeader();
    const mine = ++this.views;
    const context: Context = {
      data: this.data,
      store: this.store,
      scenes: this.scenes,
      scene: this.scene,
      fail: (error) => mine === this.views && this.fail(error),
      say: (text) => (this.spoken.textContent = text),
    };
    this.context = context;
    this.view = VIEWS[state.view][1](context);
    this.main.replaceChildren(this.view.element);
    if (state.type && this.scene.editable) {
      this.editor ??= new Editor(this.scene, (settings, refines) => this.run(settings, refines));
      if (!this.editor.element.isConnected) this.main.before(this.editor.element);
      this.editor.show(this.scene);
    } else this.editor?.element.remove();
    if (!this.host) document.title = `${VIEWS[state.view][0]} · regard`;
    this.view.update(state, EVERYTHING);
  }

  private drawHeader(): void {
    const { state } = this.store;
    const { scene } = this;
    const layer = scene.layers[state.layer];
    const active = this.header.contains(document.activeElement)
      ? document.activeElement?.closest("label")?.textContent
      : null;
    const named = (names: number[]): (readonly [string, string])[] =>
      names.map((name, k) => [String(k), String(name)] as const);
    const name = (one: Scene): string => (one.n_tokens ? `${one.name} (${count(one.n_tokens)})` : one.name);
    const parts: HTMLElement[] = [
      h("h1", {}, "regard"),
      choice(
        "Text",
        this.scenes.map((one) => [one.id, name(one)] as const),
        scene.id,
        (id) => this.store.set({ scene: id, i: -1, j: -1 }),
      ),
      choice("Layer", named(scene.layers.map((one) => one.number)), String(state.layer), (l) =>
        this.store.set({ layer: Number(l) }),
      ),
      choice("Head", named(layer.numbers), String(state.head), (k) => this.store.set({ head: Number(k) })),
    ];
    if (scene.batch > 1) {
      const b = state.scene.split(":")[1] ?? "0";
      parts.push(
        choice("Batch", named([...Array(scene.batch).keys()]), b, (to) =>
          this.store.set({ scene: to === "0" ? scene.id : `${scene.id}:${to}` }),
        ),
      );
    }
    if (scene.editable) {
      parts.push(
        h(
          "button",
          {
            type: "button",
            class: "type",
            "aria-expanded": String(state.type),
            click: () => this.store.set({ type: !state.type }),
          },
          "Type your own text",
        ),
      );
    }
    parts.push(
      h("span", { class: "gap" }),
      h(
        "button",
        { type: "button", class: "icon", title: "Save and share (s)", click: () => this.share.open() },
        "Save",
      ),
      h(
        "button",
        {
          type: "button",
          class: "icon",
          title: `Light or dark: now ${this.theme} (t)`,
          "aria-label": `Light or dark: now ${this.theme}`,
          click: () => this.turn(),
        },
        this.theme === "auto" ? "◐" : this.theme === "light" ? "☀" : "☾",
      ),
      h(
        "button",
        { type: "button", class: "icon", title: "Keys (?)", "aria-label": "Keys", click: () => this.help.showModal() },
        "?",
      ),
    );
    this.header.replaceChildren(...parts);
    if (active)
      [...this.header.querySelectorAll("label")]
        .find((label) => label.textContent?.slice(0, 5) === active.slice(0, 5))
        ?.querySelector("select")
        ?.focus();
    this.tabs.replaceChildren(
      ...Object.entries(VIEWS).map(([id, [title]]) =>
        h(
          "button",
          {
            type: "button",
            "aria-current": id === state.view ? "page" : undefined,
            "data-view": id,
            click: () => this.store.set({ view: id }),
          },
          title,
        ),
      ),
    );
    this.tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Runs the model on what was typed. What is refined, a text still being typed, gives its place up. */
  private async run(settings: Settings, refines: string): Promise<Scene> {
    const compared = this.store.state.other.split(/[:/]/)[0];
    const scene = await this.data.run(this.scene.id, settings, refines === compared ? "" : refines, compared);
    this.scenes = (await this.data.scenes()).scenes; // the last few texts that were typed stay, to be compared
    const { layers } = scene;
    const { i, j } = this.store.state;
    const kept = (at: number, n: number): number => (at < n ? at : -1);
    const part = { scene: scene.id, i: kept(i, layers[0].n_q), j: kept(j, layers[0].n_k), zoom: "" };
    this.store.set(part, refines ? "refine" : "step");
    return scene;
  }

  /** Goes past what is the same in all views. */
  private skip(): void {
    this.main.tabIndex = -1;
    this.main.focus();
  }

  private dark(): boolean {
    return this.theme === "dark" || (this.theme === "auto" && (this.host ? isDark(this.host) : this.system.matches));
  }

  private readonly dress = (): void => {
    const theme = this.dark() ? "dark" : "light";
    if (this.element.dataset.theme === theme) return;
    this.element.dataset.theme = theme;
    this.view?.update(this.store.state, new Set(["scale"]));
  };

  private turn(): void {
    this.theme = THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length];
    this.dress();
    this.drawHeader();
  }

  private readonly key = (event: Event): void => {
    if (!(event instanceof KeyboardEvent)) return;
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, textarea, select, dialog")) return;
    const { layer, head } = this.store.state;
    const layers = this.scene.layers;
    const keys: Record<string, () => void> = {
      "[": () => this.store.set({ head: Math.max(0, head - 1) }),
      "]": () => this.store.set({ head: Math.min(layers[layer].heads - 1, head + 1) }),
      "{": () => this.store.set({ layer: Math.max(0, layer - 1) }),
      "}": () => this.store.set({ layer: Math.min(layers.length - 1, layer + 1) }),
      s: () => this.share.open(),
      t: () => this.turn(),
      "?": () => this.help.showModal(),
    };
    Object.keys(VIEWS).forEach((view, k) => (keys[String(k + 1)] = () => this.store.set({ view })));
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
  }

  private clear(): void {
    this.problem.hidden = true;
  }
}

function helpDialog(): HTMLDialogElement {
  const dialog = h("dialog", { "aria-label": "Keys" });
  dialog.append(
    h("h2", {}, "Keys"),
    h("dl", {}, ...KEYS.flatMap(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
    h("button", { type: "button", click: () => dialog.close() }, "Close"),
  );
  return dialog;
}
