import katex from "katex";
import { defineConfig, type Plugin } from "vite";

import { FORMULAS, numbered } from "./src/numbers/formulas.ts";

/** Formulas need KaTeX's main fonts alone, and browsers that run this page read woff2. */
function fewerFonts(code: string): string {
  const unused = /@font-face\{[^}]*KaTeX_(?:AMS|Caligraphic|Fraktur|SansSerif|Script|Typewriter)[^}]*\}/g;
  const older = /,url\([^)]*\.(?:woff|ttf)\) format\("[^"]*"\)/g;
  return code.replace(unused, "").replace(older, "");
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
      const html = (formula: string): string => katex.renderToString(numbered(formula), { displayMode: true });
      return `export default ${JSON.stringify(Object.fromEntries(FORMULAS.map((x) => [x, html(x)])))};`;
    },
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
  plugins: [drawnFormulas(), ownStyles(), moreLicences()],
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    target: "es2022",
    minify: true,
    license: { fileName: "LICENSES.txt" },
    lib: { entry: "src/main.ts", formats: ["es"], fileName: () => "page.js", cssFileName: "page" },
    rolldownOptions: { output: { minify: true } },
  },
});
