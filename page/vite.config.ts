import { defineConfig, type Plugin } from "vite";

/** Formulas need KaTeX's main fonts alone, and browsers that run this page read woff2. */
function fewerFonts(): Plugin {
  const unused = /@font-face\{[^}]*KaTeX_(?:AMS|Caligraphic|Fraktur|SansSerif|Script|Typewriter)[^}]*\}/g;
  const older = /,url\([^)]*\.(?:woff|ttf)\) format\("[^"]*"\)/g;
  return {
    name: "fewer-fonts",
    enforce: "pre",
    transform(code, id) {
      return id.endsWith("katex.min.css") ? code.replace(unused, "").replace(older, "") : undefined;
    },
  };
}

// One module, one style sheet, nothing loaded later: the same files serve a server, a notebook and a saved file.
export default defineConfig({
  plugins: [fewerFonts()],
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    target: "es2022",
    minify: true,
    lib: { entry: "src/main.ts", formats: ["es"], fileName: () => "page.js", cssFileName: "page" },
    rolldownOptions: { output: { minify: true } },
  },
});
