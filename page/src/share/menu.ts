/** What can be taken away from the page: a link, the page, pictures and numbers of what is seen. */

import { h } from "../dom";
import { START, toHash } from "../state";
import { headName, type Context } from "../views/view";
import { figureOf } from "./figures";
import { csvOf, npzOf, partOfTable, tableOf } from "./tables";

interface Item {
  key: string;
  title: string;
  about: string;
  act(context: Context): Promise<string>;
}

/** Where the saved page finds the state that it begins with. */
const PLACE = '<div id="regard-page"';

const LINK: Item = {
  key: "l",
  title: "Copy a link",
  about: "to this view: text, head, tokens, zoom and settings",
  act: async () => {
    await navigator.clipboard.writeText(location.href);
    return "The link is copied.";
  },
};

const PAGE: Item = {
  key: "w",
  title: "Save the page",
  about: "one file that opens anywhere, without a server",
  act: async (context) => {
    const { state } = context.store;
    const { html } = await context.data.page(state.scene.split(":")[0]);
    const start = toHash({ ...state, scene: "", type: false, text: START.text, other: "" });
    save(
      html.replace(PLACE, () => `${PLACE} data-state="${start.replaceAll("&", "&amp;")}"`),
      fileName(context, "html"),
      "text/html",
    );
    return "The page is saved.";
  },
};

const picture = (key: string, ending: "png" | "svg", type: string, about: string): Item => ({
  key,
  title: `${ending.toUpperCase()} of this view`,
  about,
  act: async (context) => {
    save(await (await figureOf(context))[ending](), fileName(context, ending), type);
    return "The picture is saved.";
  },
});

const PNG = picture("p", "png", "image/png", "7 inches wide at 300 pixels an inch, with a caption");
const SVG = picture("s", "svg", "image/svg+xml", "the same, to be enlarged and edited");

const OF = {
  row: ["this row", "the chosen query on all keys"],
  part: ["this part of the map", "what is seen of the map, every pair"],
} as const;

function table(key: string, what: "row" | "part", ending: "csv" | "npz"): Item {
  const [of, about] = OF[what];
  const [name, type] = ending === "csv" ? ["CSV", "text/csv"] : [".npz", "application/zip"];
  return {
    key,
    title: `${name} of ${of}`,
    about,
    act: async (context) => {
      const weights = await tableOf(context, partOfTable(context, what));
      save(ending === "csv" ? csvOf(weights) : npzOf(weights), fileName(context, ending), type);
      return "The weights are saved.";
    },
  };
}

const TABLES = [
  table("c", "row", "csv"),
  table("n", "row", "npz"),
  table("t", "part", "csv"),
  table("z", "part", "npz"),
];

/** A menu of what can be saved, each entry with a letter. */
export class ShareMenu {
  readonly element = h("dialog", { "aria-label": "Save and share", class: "share" });
  private readonly said = h("p", { role: "status", class: "help" });
  private items: Item[] = [];

  constructor(private readonly context: () => Context | null) {
    this.element.addEventListener("keydown", (event) => {
      const item = this.items.find(({ key }) => key === event.key);
      if (!item || !this.element.open || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      void this.act(item);
    });
  }

  open(): void {
    const kind = this.context()?.data.source.kind;
    this.items = [
      ...(kind === "notebook" ? [] : [LINK]), // the notebook's address is not ours
      ...(kind === "file" ? [] : [PAGE]),
      PNG,
      SVG,
      ...TABLES,
    ];
    this.said.textContent = "";
    this.element.replaceChildren(
      h("h2", {}, "Save and share"),
      h(
        "ul",
        {},
        ...this.items.map((item) =>
          h(
            "li",
            {},
            h(
              "button",
              { type: "button", "data-item": item.key, click: () => void this.act(item) },
              h("kbd", { "aria-hidden": "true" }, item.key),
              h("span", {}, h("b", {}, item.title), h("small", {}, item.about)),
            ),
          ),
        ),
      ),
      this.said,
      h("button", { type: "button", click: () => this.element.close() }, "Close"),
    );
    this.element.showModal();
  }

  private async act(item: Item): Promise<void> {
    const context = this.context();
    if (!context) return;
    this.said.textContent = "…";
    try {
      this.said.textContent = await item.act(context);
    } catch (error) {
      this.said.textContent = error instanceof Error ? error.message : String(error);
    }
  }
}

function fileName(context: Context, ending: string): string {
  const { layer, head } = context.store.state;
  const name = headName(context.scene, layer, head).replace(" ", "");
  return `regard-${context.store.state.view}-${name}.${ending}`;
}

function save(content: string | Blob | Uint8Array<ArrayBuffer>, name: string, type: string): void {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = h("a", { href: address, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // browsers read it after the click
}
