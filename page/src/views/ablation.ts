import type { Ablations } from "../data";
import { choice, h, redraw } from "../dom";
import { effectsOf } from "../numbers/effects";
import { tokenChooser } from "../parts/chooser";
import { EffectList } from "../parts/effectlist";
import { moved } from "../parts/moved";
import { withoutHead } from "../parts/withouthead";
import type { State } from "../state";
import { whyNot } from "./switching";
import {
  chosenQuery,
  headAt,
  headName,
  latest,
  layerOf,
  tokensOf,
  touches,
  type Context,
  type MakeView,
  type View,
} from "./view";

/** The time between two looks at losses that are still computed. */
const AGAIN_MS = 400;

const REPLACEMENTS = [
  ["zero", "nothing"],
  ["mean", "its mean over the text"],
] as const;

export const ablationView: MakeView = (context) => new AblationView(context);

/** The model without one head: what it loses, and what it then expects. */
class AblationView implements View {
  private readonly controls = h("div", { class: "controls" });
  private readonly list: EffectList;
  private readonly detail = h("div", { class: "detail" });
  /** What the chosen head takes along. */
  private readonly row = h("div", { class: "moved" });
  readonly element: HTMLElement;
  /** What is missing for a head to be switched off; empty if nothing is. */
  private readonly why: string;
  private readonly loadList;
  private readonly loadDetail;
  private readonly loadRow;

  constructor(private readonly context: Context) {
    const { data, store, scene, scenes } = context;
    this.loadList = latest(context.fail);
    this.loadDetail = latest(context.fail);
    this.loadRow = latest(context.fail);
    this.list = new EffectList(scene, (head) => store.set(head));
    this.why = whyNot(scene, scenes, data.source.kind);
    this.list.element.hidden = this.detail.hidden = Boolean(this.why);
    this.detail.addEventListener("click", (event) => {
      const token = (event.target as HTMLElement).closest<HTMLElement>("[data-token]")?.dataset.token;
      if (token) store.set({ i: Number(token) });
    });
    const right = { class: "right", tabindex: 0, role: "region", "aria-label": "Without the chosen head" };
    this.element = h(
      "section",
      { class: "view ablation", "aria-label": "Does it matter?" },
      this.controls,
      h("p", { class: "empty", role: "status" }, this.why),
      h("div", { class: "ablation-main" }, this.list.element, h("div", right, this.detail, this.row)),
    );
  }

  update(state: State, changed: ReadonlySet<keyof State>): void {
    const anew = touches(changed, "scene", "without");
    if (!anew && !touches(changed, "layer", "head", "i", "scale")) return;
    this.drawControls();
    this.showRow();
    if (this.why) return;
    this.showDetail();
    if (anew) this.showList();
    else this.list.mark(state);
  }

  /** What is put in the head's place. */
  private get how(): "zero" | "mean" {
    return this.context.store.state.without === "mean" ? "mean" : "zero";
  }

  private drawControls(): void {
    const { store } = this.context;
    const layer = layerOf(this.context);
    const i = chosenQuery(store.state, layer);
    const replacement = choice("In the head's place", REPLACEMENTS, this.how, (without) => store.set({ without }));
    const chooser = tokenChooser(this.context, "Token", "query", i, layer.n_q, (to) => store.set({ i: to }));
    redraw(this.controls, this.why ? null : replacement, chooser);
  }

  private showList(): void {
    this.loadList(async (current) => {
      const { data, store } = this.context;
      this.list.wait();
      const ablations = (): Promise<Ablations> => data.ablations(store.state.scene, this.how);
      const kinds = await data.heads(store.state.scene);
      for (let known = await ablations(); current(); known = await ablations()) {
        this.list.show(known.loss, effectsOf(known), kinds.rows, store.state, known.done);
        if (known.done === 1) break;
        await new Promise((resolve) => setTimeout(resolve, AGAIN_MS)); // heads fill in as they come
      }
    });
  }

  private showDetail(): void {
    this.loadDetail(async (current) => {
      const { data, store, scene } = this.context;
      const at = headAt(store.state);
      const layer = layerOf(this.context);
      const i = chosenQuery(store.state, layer);
      const keys = tokensOf(this.context).key;
      const [ablation] = await Promise.all([data.ablation(at, this.how, i), keys?.load(0, layer.n_k)]);
      if (!current()) return;
      const tokens = Array.from({ length: layer.n_k }, (_, t) => keys?.at(t) ?? "");
      this.detail.replaceChildren(...withoutHead(headName(scene, at.layer, at.head), ablation, tokens, i));
    });
  }

  private showRow(): void {
    this.loadRow(async (current) => {
      const { store } = this.context;
      const rows = await moved(this.context, chosenQuery(store.state, layerOf(this.context)));
      if (current()) this.row.replaceChildren(...rows);
    });
  }
}
