import katex from "katex";
import { defineConfig, type Plugin } from "vite";

import { FORMULAS, numbered } from "./src/numbers/formulas.ts";

/** Formulas need KaTeX's upright and italic letters and large signs alone, and browsers that run this page read woff2. */
function fewerFonts(code: string): string {
  const used = /KaTeX_(?:Main;font-style:normal;font-weight:400|Math;font-style:italic;font-weight:400|Size\d;)/;
  const older = /,url\([^)]*\.(?:woff|ttf)\) format\("[^"]*"\)/g;
  return code.replace(/@font-face\{[^}]*\}/g, (face) => (used.test(face) ? face.replace(older, "") : ""));
}

/** Style sheets of libraries hold for this page alone: in a notebook, others use the same libraries. */
function ownStyles(): Plugin {
  const fonts = /@font-face\{[^}]*\}/g;
  return {
    name: "own-styles",
    enforce: "pre",
    transform(code, id) {
      if (!/node_modules.*\.css$/.test(id)) return undefined;
      const fewer = fewerFonts(code);
      return `${(fewer.match(fonts) ?? []).join("")}:where(.regard){${fewer.replace(fonts, "")}}`;
    },
  };
}

/** The module `virtual:formulas`: the page holds drawings in place of KaTeX. */
function drawnFormulas(): Plugin {
  const name = "virtual:formulas";
  return {
    name: "drawn-formulas",
    resolveId: (id) => (id === name ? `\0${name}` : undefined),
    load(id) {
      if (id !== `\0${name}`) return undefined;
      return moduleOf(FORMULAS.map((x) => [x, katex.renderToString(numbered(x), { displayMode: true })]));
    },
  };
}

/** A module of named texts of HTML. Their tags are alike: each is kept once, and a text is a list of their numbers. */
function moduleOf(texts: [name: string, html: string][]): string {
  const split = texts.map(([name, html]) => [name, html.split(/(?=<)/)] as const);
  const tags = [...new Set(split.flatMap(([, parts]) => parts))];
  const numbers = new Map(tags.map((tag, k) => [tag, k]));
  const coded = split.map(([name, parts]) => [name, parts.map((part) => numbers.get(part))]);
  return `const tags = ${JSON.stringify(tags)};
    export default Object.fromEntries(
      ${JSON.stringify(coded)}.map(([name, parts]) => [name, parts.map((k) => tags[k]).join("")]),
    );`;
}

/** Parts of OpenSeadragon that the page does not use: other tile protocols, buttons and strips, other drawers. */
const UNUSED_PARTS = [
  ...["DziTileSource", "IIIFTileSource", "OsmTileSource", "TmsTileSource", "LegacyTileSource", "ImageTileSource"],
  ...["TileSourceCollection", "DisplayRect", "Button", "ButtonGroup", "ReferenceStrip"],
  ...["HTMLDrawer", "WebGLDrawer", "Mat3"],
];

/** OpenSeadragon comes as one file, of which a bundler keeps all; each part of it begins with its name. */
function fewerParts(): Plugin {
  const heading = String.raw`/\*\n \* OpenSeadragon - `;
  const without = (code: string, name: string): string => {
    const part = new RegExp(`${heading}${name}\n[^]*?(?=${heading})`);
    if (!part.test(code)) throw new Error(`OpenSeadragon has no part ${name}`);
    return code.replace(part, "");
  };
  return {
    name: "fewer-parts",
    enforce: "pre",
    transform: (code, id) => (id.endsWith("/openseadragon.js") ? UNUSED_PARTS.reduce(without, code) : undefined),
  };
}

const PACKAGES = "node_modules";

/** What the copyright holders of a TrueType font say of its licence: record 13 of its table of names. */
function licenceOf(font: Uint8Array): string {
  const view = new DataView(font.buffer, font.byteOffset, font.byteLength);
  let names = 12;
  while (view.getUint32(names) !== 0x6e616d65) names += 16; // "name"
  names = view.getUint32(names + 8);
  let record = names + 6;
  while (view.getUint16(record + 6) !== 13) record += 12;
  const start = names + view.getUint16(names + 4) + view.getUint16(record + 10);
  return new TextDecoder("utf-16be").decode(font.subarray(start, start + view.getUint16(record + 8)));
}

/** What Vite's list of licences lacks: those of the fonts, and of the lines that Rolldown puts around modules. */
function moreLicences(): Plugin {
  return {
    name: "more-licences",
    async writeBundle({ dir }, bundle) {
      const style = bundle["page.css"];
      if (dir === undefined || style?.type !== "asset") throw new Error("the build has no page.css");
      const fonts = `${PACKAGES}/katex/dist/fonts`;
      const files = (await this.fs.readdir(fonts)).filter((name) => name.endsWith(".ttf"));
      const found: Record<string, string> = {};
      for (const [, family] of style.source.toString().matchAll(/@font-face\{[^}]*?font-family:(\w+)/g)) {
        const file = files.find((name) => name.startsWith(`${family}-`));
        found[family!] = licenceOf(await this.fs.readFile(`${fonts}/${file}`));
      }
      found["rolldown"] = await this.fs.readFile(`${PACKAGES}/rolldown/LICENSE`, { encoding: "utf8" });
      const sections = Object.entries(found).map(([name, text]) => `\n## ${name}\n\n${text.trim()}\n`);
      await this.fs.appendFile(`${dir}/LICENSES.txt`, sections.join(""));
    },
  };
}

// One module, one style sheet, nothing loaded later: the same files serve a server, a notebook and a saved file.
export default defineConfig({
  plugins: [drawnFormulas(), fewerParts(), ownStyles(), moreLicences()],
  assetsInclude: ["**/*.safetensors"], // which tests read
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    target: "es2022",
    minify: true,
    license: { fileName: "LICENSES.txt" },
    lib: { entry: "src/main.ts", formats: ["es"], fileName: () => "page.js", cssFileName: "page" },
    rolldownOptions: { output: { minify: true } },
  },
});
