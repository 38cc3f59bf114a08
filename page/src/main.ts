/** Where the page begins: in a document of its own, or in the cell of a notebook. */

import "./style.css";

import { App } from "./app";
import { FileSource } from "./source/file";
import { HttpSource } from "./source/http";
import { NotebookSource, type WidgetModel } from "./source/notebook";
import { followAddress, fromHash, START, Store } from "./state";

/** The entry of the anywidget. */
function render({ model, el }: { model: WidgetModel; el: HTMLElement }): () => void {
  const source = new NotebookSource(model);
  const app = new App(source, new Store(START), el);
  el.replaceChildren(app.element);
  void app.start().then((shown) => {
    // The picture before the page, for where no kernel answers.
    const still = `[data-regard-still="${CSS.escape(String(model.get("still")))}"]`;
    if (shown) for (const picture of document.querySelectorAll<HTMLElement>(still)) picture.hidden = true;
  });
  return () => {
    app.destroy();
    source.close();
  };
}

async function open(place: HTMLElement): Promise<void> {
  const stored = document.getElementById("regard-data")?.textContent;
  const source = stored ? await FileSource.of(stored) : new HttpSource();
  const store = new Store(fromHash(location.hash || (place.dataset.state ?? "")));
  followAddress(store);
  const app = new App(source, store, null);
  place.replaceWith(app.element);
  await app.start();
}

const place = document.getElementById("regard-page");
if (place) void open(place);

/** For pages that hold answers of their own. */
export { FileSource };

export default { render };
