/** What the page and its Python say to each other. */

/** To Python: run a block. Its name is that of a file in errors. */
export interface Run {
  name: string;
  source: string;
}

/** From Python, of the block that runs: what it prints, a picture as SVG, a traceback. */
export interface Output {
  kind: "text" | "picture" | "error";
  content: string;
}

/** Bytes of Python that are here, and all of them. */
export interface Loading {
  kind: "loading";
  loaded: number;
  total: number;
}

export type Answer =
  Loading | Output | { kind: "ready" } | { kind: "failed"; why: string } | { kind: "done"; ok: boolean };
