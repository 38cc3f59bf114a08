import type { Ablation, HeadRow } from "../data";
import { choice, h } from "../dom";
import { css, ramp, readableOn, SIGNED } from "../numbers/colour";
import { printable, readable } from "../numbers/format";
import { tokenChooser } from "../parts/chooser";
import { kindsOf } from "../parts/headgrid";
import { nameOf } from "../parts/sentences";
import { moved } from "../parts/moved";
import { chosenQuery, headAt, headName, latest, layerOf, tokensOf, touches, type MakeView } from "./view";

/** Tokens of a long text that are shown, those around the chosen one. */
const SHOWN = 600;

/** Nats that count as a change where a token is shaded. */
const LEAST = 0.02;

const NO_MODEL = "A saved page has no model: start `regard look` to switch a head off.";
const NOT_HERE =
  "Heads can be switched off in models that run here: choose a text of regard's example model, above or by `regard look`.";

const REPLACEMENTS = [
  ["zero", "nothing"],
  ["mean", "its mean over the text"],
] as const;

/** With its sign. */
const change = (x: number): string => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(3)}`;

const percent = (share: number): string => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

function bar(share: number, said: string, kind: string): HTMLElement {
  const element = h("span", { class: `amount ${kind}` }, h("b", {}, said));
  element.style.setProperty("--share", String(Math.max(0, Math.min(1, share))));
  return element;
}

/** The model without one head: what it loses, and what it then expects. */
export const ablationView: MakeView = (context) => {
  const { data, store, scene } = context;
  const controls = h("div", { class: "controls" });
  const missing = h("p", { class: "empty", role: "status" });
  const list = h("ol", { class: "effects" });
  const whole = h("p", { class: "help" });
  const detail = h("div", { class: "detail" });
  const row = h("div", { class: "moved" });
  const left = h(
    "div",
    { class: "left", tabindex: 0, role: "region", "aria-label": "Heads by the loss without them" },
    h("h2", {}, "Every head, by how much the loss rises without it"),
    whole,
    list,
  );
  const element = h(
    "section",
    { class: "view ablation", "aria-label": "Does it matter?" },
    controls,
    missing,
    h(
      "div",
      { class: "ablation-main" },
      left,
      h("div", { class: "right", tabindex: 0, role: "region", "aria-label": "Without the chosen head" }, detail, row),
    ),
  );
  const why = data.source.kind === "file" && !scene.editable ? NO_MODEL : scene.settings ? "" : NOT_HERE;
  let kinds: HeadRow[] = [];

  const how = (): "zero" | "mean" => (store.state.without === "mean" ? "mean" : "zero");

  function drawControls(): void {
    const layer = layerOf(context);
    const active = controls.contains(document.activeElement) ? document.activeElement?.getAttribute("title") : null;
    controls.replaceChildren(
      ...(why ? [] : [choice("In the head's place", REPLACEMENTS, how(), (without) => store.set({ without }))]),
      tokenChooser(context, "Token", "query", chosenQuery(store.state, layer), layer.n_q, (i) => store.set({ i })),
    );
    if (active) controls.querySelector<HTMLElement>(`[title="${active}"]`)?.focus();
  }

  const rank = latest(context.fail);
  const showList = (): void =>
    rank(async (current) => {
      if (!list.childElementCount) whole.textContent = "Running the model without each head …";
      const { loss, rows } = await data.ablations(store.state.scene, how());
      const measured = await data.heads(store.state.scene);
      if (!current()) return;
      kinds = measured.rows;
      const most = Math.max(...rows.map((one) => Math.abs(one.loss - loss))) || 1;
      whole.textContent = `Loss with all heads: ${loss.toFixed(3)} nats a byte. Orange: more without this head; blue: less.`;
      const active = list.contains(document.activeElement);
      list.replaceChildren(
        ...[...rows]
          .sort((a, b) => b.loss - a.loss)
          .map((one) => {
            const name = headName(scene, one.layer, one.head);
            const mine = kinds.find(({ layer, head }) => layer === one.layer && head === one.head);
            const by = one.loss - loss;
            const is = one.layer === store.state.layer && one.head === store.state.head;
            const button = h(
              "button",
              {
                type: "button",
                class: is ? "effect current" : "effect",
                "aria-pressed": String(is),
                "data-head": `${one.layer}/${one.head}`,
                "data-change": by,
                click: () => store.set({ layer: one.layer, head: one.head }),
              },
              h("span", { class: "name" }, name),
              h("span", { class: "kind" }, mine ? kindsOf(mine) : ""),
              bar(Math.abs(by) / most, change(by), by < 0 ? "less" : "more"),
            );
            return h("li", {}, button);
          }),
      );
      if (active) list.querySelector<HTMLElement>(".current")?.focus();
    });

  function mark(): void {
    for (const button of list.querySelectorAll("button")) {
      const is = button.dataset.head === `${store.state.layer}/${store.state.head}`;
      button.classList.toggle("current", is);
      button.setAttribute("aria-pressed", String(is));
    }
  }

  /** The text, each token shaded by how much harder it is to predict without the head. */
  function harder({ losses }: Ablation, tokens: string[], i: number): HTMLElement {
    const changes = losses.after.map((after, t) => after - losses.before[t]);
    const most = Math.max(LEAST, ...changes.map(Math.abs));
    const start = Math.max(0, Math.min(tokens.length - SHOWN, i - (SHOWN >> 1)));
    const stop = Math.min(tokens.length, start + SHOWN);
    const text = h("p", { class: "shaded" }, start ? "… " : "");
    for (let t = start; t < stop; t++) {
      const by = t ? changes[t - 1] : 0;
      const span = h(
        "span",
        { class: t === i ? "token query" : "token", "data-token": t },
        readable(tokens[t]).replaceAll("\n", "↵") || "∅",
      );
      if (Math.abs(by) >= LEAST) {
        const colour = ramp(SIGNED, 0.5 - (Math.sign(by) * Math.sqrt(Math.abs(by) / most)) / 2);
        span.style.background = css(colour);
        span.style.color = readableOn(colour);
      }
      span.title = t ? `${nameOf(tokens, t)}: ${change(by)} nats` : "the beginning is given, not predicted";
      text.append(span);
    }
    if (stop < tokens.length) text.append(" …");
    return text;
  }

  const look = latest(context.fail);
  const showDetail = (): void =>
    look(async (current) => {
      const at = headAt(store.state);
      const layer = layerOf(context);
      const i = chosenQuery(store.state, layer);
      const keys = tokensOf(context).key;
      const [told] = await Promise.all([data.ablation(at, how(), i), keys?.load(0, layer.n_k)]);
      if (!current()) return;
      const tokens = Array.from({ length: layer.n_k }, (_, t) => keys?.at(t) ?? "");
      const name = headName(scene, at.layer, at.head);
      const mean = (x: number[]): number => x.reduce((sum, one) => sum + one, 0) / x.length;
      const [before, after] = [mean(told.losses.before), mean(told.losses.after)];
      const verb = after - before > 0.0005 ? "rises" : before - after > 0.0005 ? "falls" : "stays as it is";
      detail.replaceChildren(
        h("h2", {}, `Without ${name}`),
        h(
          "p",
          { class: "outcome" },
          verb === "stays as it is"
            ? `The loss of this text stays as it is, ${before.toFixed(3)} nats a byte.`
            : `The loss of this text ${verb} from ${before.toFixed(3)} to ${after.toFixed(3)} nats a byte.`,
        ),
        h("h2", {}, `What the model expects after ${nameOf(tokens, i)}`),
        h(
          "table",
          { class: "odds" },
          h(
            "thead",
            {},
            h("tr", {}, ...["token", "with the head", "without it"].map((text) => h("th", { scope: "col" }, text))),
          ),
          h(
            "tbody",
            {},
            ...told.odds.map((odd) =>
              h(
                "tr",
                { "data-odds": odd.token },
                h(
                  "th",
                  { scope: "row" },
                  h("span", { class: "word" }, printable(odd.token)),
                  odd.actual && h("small", {}, " comes next"),
                ),
                h("td", { "data-before": odd.before }, bar(odd.before, percent(odd.before), "before")),
                h("td", { "data-after": odd.after }, bar(odd.after, percent(odd.after), "after")),
              ),
            ),
          ),
        ),
        h("h2", {}, "Where in the text"),
        h(
          "p",
          { class: "help" },
          "Orange: harder to predict without the head; blue: easier. Choose a token to see its odds.",
        ),
        harder(told, tokens, i),
      );
    });

  detail.addEventListener("click", (event) => {
    const token = (event.target as HTMLElement).closest<HTMLElement>("[data-token]")?.dataset.token;
    if (token) store.set({ i: Number(token) });
  });

  const weigh = latest(context.fail);
  const showRow = (): void =>
    weigh(async (current) => {
      const shown = await moved(context, chosenQuery(store.state, layerOf(context)));
      if (current()) row.replaceChildren(...shown);
    });

  missing.textContent = why;
  left.hidden = detail.hidden = Boolean(why);

  const show = (anew: boolean): void => {
    drawControls();
    showRow();
    if (why) return;
    showDetail();
    if (anew) showList();
    else mark();
  };

  return {
    element,
    update(_, changed) {
      if (touches(changed, "scene", "without")) show(true);
      else if (touches(changed, "layer", "head", "i", "scale")) show(false);
    },
  };
};
