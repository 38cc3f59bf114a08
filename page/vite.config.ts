import { defineConfig, type Plugin } from "vite";

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

// One module, one style sheet, nothing loaded later: the same files serve a server, a notebook and a saved file.
export default defineConfig({
  plugins: [ownStyles()],
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    target: "es2022",
    minify: true,
    lib: { entry: "src/main.ts", formats: ["es"], fileName: () => "page.js", cssFileName: "page" },
    rolldownOptions: { output: { minify: true } },
  },
});
