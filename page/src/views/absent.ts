import { h } from "../dom";
import type { MakeView } from "./view";

const ROWS =
  "This file holds the rows of words over the picture, and no whole heads, which this view needs. " +
  "The page that it was saved from, of regard.look, shows it.";

/** In place of a view that a file has too little for: the reason. */
export const absentView: MakeView = () => ({
  element: h("section", { class: "view absent", "aria-label": "Not in this file" }, h("p", { class: "empty" }, ROWS)),
  update: () => {},
});
