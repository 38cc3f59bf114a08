import type { Column, HeadRow, Heads } from "../data";
import { breakable, choice, h } from "../dom";
import { css, ramp, SCALES, toned } from "../numbers/colour";
import { figure } from "../numbers/format";
import { kindsOf } from "../parts/headgrid";
import { definitionOf } from "../parts/terms";
import { thumb } from "../parts/thumb";
import type { State } from "../state";
import { headName, latest, scaleName, touches, type MakeView } from "./view";

const SIZE = 64;

/** Pairs in all heads, from which on they are measured only when that is asked for: some ten seconds of work. */
const LONG = 2 ** 33;

/** Heads of each kind that are listed. */
const STRONGEST = 3;

/** So many heads have room to be drawn larger. */
const FEW = 16;

/** Every head of every layer, small; sorted and filtered by what was measured. */
export const headsView: MakeView = (context) => {
  const { data, store, scene } = context;
  const grid = h("div", { class: "cards" });
  const controls = h("div", { class: "controls" });
  const note = h("p", { class: "note", role: "status" });
  const aside = h("aside", { class: "kinds", "aria-label": "The strongest heads of each kind", hidden: true });
  const estimates = h(
    "p",
    { class: "note", hidden: true },
    "≈ A picture of a long head is an estimate from some of its queries, until the maps of its layer have been computed; maps are exact.",
  );
  const element = h(
    "section",
    { class: "view heads", "aria-label": "Heads" },
    controls,
    note,
    estimates,
    h("div", { class: "heads-main", tabindex: 0, role: "region", "aria-label": "All heads" }, grid, aside),
  );
  let heads: Heads = { columns: [], rows: placeholders() };
  const wanted = new IntersectionObserver(fill, { rootMargin: "300px" });

  function placeholders(): HeadRow[] {
    return scene.layers.flatMap((layer, l) =>
      Array.from({ length: layer.heads }, (_, head) => ({
        layer: l,
        head,
        kv_head: head,
        kind: null,
        kinds: [],
        scores: {},
      })),
    );
  }

  /** The end of a column's scale: the largest score there is, where nothing else is. */
  const highest = (column: Column): number =>
    column.high ?? Math.max(column.low, ...heads.rows.map((row) => row.scores[column.name] ?? column.low));

  /** Brings the pictures of the cards that come into view. */
  function fill(entries: IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      wanted.unobserve(target);
      const [layer, head] = (target.getAttribute("data-head") as string).split("/").map(Number);
      const { scene: id, tone } = store.state;
      const scale = scaleName(store.state);
      data.thumbs(id, layer, SIZE, "max").then(({ bits, exact }) => {
        target.replaceChildren(thumb(bits, head, SIZE, scale, tone));
        if (exact) return;
        target.append(h("span", { class: "about", title: "An estimate" }, "≈"));
        estimates.hidden = false;
      }, context.fail);
    }
  }

  function card(row: HeadRow, column: Column | undefined, state: State): HTMLElement {
    const picture = h("div", { class: "thumb sheet", "data-head": `${row.layer}/${row.head}` });
    const score = column ? row.scores[column.name] : undefined;
    const share = column && typeof score === "number" ? (score - column.low) / (highest(column) - column.low || 1) : 0;
    const kind = kindsOf(row);
    const defined = row.kinds.map((one) => definitionOf(one.kind, context.words)).join(" ");
    const { number: layer, numbers } = scene.layers[row.layer];
    const name = `Layer ${layer}, head ${numbers[row.head]}`;
    const current = row.layer === state.layer && row.head === state.head;
    const said = [name, kind, column && `${column.label} ${figure(score)}`].filter(Boolean).join(", ");
    const element = h(
      "button",
      {
        type: "button",
        class: current ? "card current" : "card",
        title: `${said}. Open its map.${defined ? `\n${defined}` : ""}`,
        click: () => store.set({ view: "map", layer: row.layer, head: row.head }),
      },
      picture,
      h("span", { class: "name" }, `${layer}.${numbers[row.head]}`),
      ...row.kinds.map(({ name, score, tentative }) =>
        h(
          "span",
          { class: tentative ? "kind tentative" : "kind" },
          h("span", {}, `${name}${tentative ? "?" : ""}`),
          h("b", {}, score.toFixed(2)),
        ),
      ),
    );
    if (column) {
      const bar = h("span", { class: "bar" });
      bar.style.setProperty("--share", String(Math.max(0, Math.min(1, share))));
      element.append(
        h(
          "span",
          { class: "score" },
          bar,
          h("span", {}, figure(typeof score === "number" ? Number(score.toPrecision(2)) : score)),
        ),
      );
    }
    wanted.observe(picture);
    return element;
  }

  /** What the colours and the axes of the pictures are. */
  function legend(): HTMLElement {
    const scale = SCALES[scaleName(store.state)];
    const stops = Array.from({ length: 11 }, (_, k) => css(ramp(scale, toned(k / 10, 1, store.state.tone))));
    const bar = h("span", { class: "scale-bar" });
    bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    return h("p", { class: "heads-legend" }, "query ↓ key →", h("span", {}, "weight 0"), bar, h("span", {}, "1"));
  }

  function draw(): void {
    const { state } = store;
    const column = heads.columns.find((c) => c.name === state.sort);
    let rows = heads.rows.filter((row) => state.filter === "all" || kindNames(row).includes(state.filter));
    if (column) {
      const score = (row: HeadRow): number => row.scores[column.name] ?? -Infinity;
      rows = rows
        .filter((row) => state.least <= column.low || score(row) >= state.least)
        .sort((a, b) => score(b) - score(a));
    }
    wanted.disconnect();
    const ordered = !column && state.filter === "all";
    grid.classList.toggle("by-layer", ordered);
    grid.classList.toggle("few", heads.rows.length <= FEW);
    if (ordered) {
      const layers = grouped(rows);
      grid.replaceChildren(
        ...[...layers].map(([l, mine]) =>
          h(
            "div",
            { class: "layer", role: "group", "aria-label": `Layer ${scene.layers[l].number}` },
            h(
              "h2",
              {},
              `Layer ${scene.layers[l].number}`,
              !/^layers?[ .]\d+$/.test(scene.layers[l].name) && h("small", {}, ...breakable(scene.layers[l].name)),
            ),
            h("div", { class: "row" }, ...mine.map((row) => card(row, undefined, state))),
          ),
        ),
      );
    } else grid.replaceChildren(...rows.map((row) => card(row, column, state)));
    if (!rows.length)
      grid.replaceChildren(h("p", { class: "empty" }, "No head is like this. Choose another kind or a lower score."));
  }

  /** The strongest heads of each kind, and what the kind is. */
  function drawKinds(): void {
    aside.hidden = !heads.columns.length;
    aside.replaceChildren(
      ...context.words.kinds.map(({ name, definition }) => {
        const strongest = heads.rows
          .filter((row) => typeof row.scores[name] === "number")
          .sort((a, b) => (b.scores[name] ?? 0) - (a.scores[name] ?? 0))
          .slice(0, STRONGEST);
        return h(
          "div",
          { class: "one-kind" },
          h("h2", {}, name),
          h("p", {}, strongest.length ? definition : "Nothing repeats here, or there are no tokens."),
          h(
            "ol",
            { class: "shares" },
            ...strongest.map(({ layer, head, scores }) => {
              const score = scores[name] ?? 0;
              const bar = h("span", { class: "share" });
              bar.style.setProperty("--share", String(score));
              return h(
                "li",
                {},
                h(
                  "button",
                  { type: "button", click: () => store.set({ view: "overview", layer, head }) },
                  h("span", {}, headName(scene, layer, head)),
                  bar,
                  h("b", {}, score.toFixed(2)),
                ),
              );
            }),
          ),
        );
      }),
    );
  }

  function drawControls(): void {
    const { state } = store;
    const kinds = [...new Set(heads.rows.flatMap(kindNames))].sort();
    const column = heads.columns.find((c) => c.name === state.sort);
    const parts: HTMLElement[] = [
      choice(
        "Sort by",
        [["place", "layer and head"], ...heads.columns.map((c) => [c.name, c.label] as const)],
        state.sort,
        (sort) => store.set({ sort, least: heads.columns.find((c) => c.name === sort)?.low ?? 0 }),
      ),
      choice(
        "Kind",
        [["all", "all kinds"], ...kinds.map((k) => [k, k === "none" ? "no notable kind" : k] as const)],
        state.filter,
        (filter) => store.set({ filter }),
      ),
    ];
    if (column) {
      const shown = h("output", {}, figure(state.least));
      const slider = h("input", {
        type: "range",
        min: column.low,
        max: highest(column),
        step: (highest(column) - column.low) / 100 || 0.01,
        value: state.least,
        input: () => {
          shown.textContent = figure(Number(slider.value));
          store.set({ least: Number(slider.value) });
        },
      });
      parts.push(
        h("label", { class: "field" }, h("span", {}, "At least"), slider, shown),
        h("p", { class: "help" }, column.help),
      );
    }
    const kind = context.words.kinds.find(({ name }) => name === state.filter);
    if (kind) parts.push(h("p", { class: "help" }, `${kind.definition} Score: ${kind.meaning}.`));
    else if (!column)
      parts.push(h("p", { class: "help" }, `A kind is named with its score; ${context.words.tentative}.`));
    parts.push(legend());
    const had = controls.contains(document.activeElement)
      ? [...controls.querySelectorAll("select, input")].indexOf(document.activeElement as Element)
      : -1;
    controls.replaceChildren(...parts);
    if (had >= 0) controls.querySelectorAll<HTMLElement>("select, input")[had]?.focus();
  }

  const load = latest(context.fail);
  const show = (): void => {
    drawControls();
    draw();
    const pairs = scene.layers.reduce((sum, layer) => sum + layer.heads * layer.n_q * layer.n_k, 0);
    if (data.source.kind !== "file" && pairs > LONG && !data.measured.has(store.state.scene)) {
      const measure = (): void => {
        data.measured.add(store.state.scene);
        show();
      };
      note.replaceChildren(
        `Scores and kinds take a pass over all ${(pairs / 1e9).toFixed(0)} billion pairs. `,
        h("button", { type: "button", click: measure }, "Measure the heads"),
      );
      return;
    }
    note.textContent = "Measuring the heads …";
    load(async (current) => {
      const answer = await data.heads(store.state.scene);
      if (!current()) return;
      heads = answer;
      note.textContent = "";
      drawControls();
      drawKinds();
      draw();
    });
  };

  return {
    element,
    update(_, changed) {
      if (changed.has("scene")) show();
      else if (touches(changed, "sort", "filter")) {
        drawControls();
        draw();
      } else if (touches(changed, "least", "layer", "head", "scale", "tone")) {
        if (touches(changed, "scale", "tone")) drawControls();
        draw();
      }
    },
    destroy: () => wanted.disconnect(),
  };
};

/** The kinds that a head is found under. */
const kindNames = (row: HeadRow): string[] => (row.kinds.length ? row.kinds.map(({ kind }) => kind) : ["none"]);

function grouped(rows: HeadRow[]): Map<number, HeadRow[]> {
  const groups = new Map<number, HeadRow[]>();
  for (const row of rows) groups.set(row.layer, [...(groups.get(row.layer) ?? []), row]);
  return groups;
}
