import tseslint from "typescript-eslint";

// Functions here are longer than 80 lines. None is added; a file that is split leaves the list.
const VIEWS_TO_SPLIT = ["profiles"];
const long = VIEWS_TO_SPLIT.map((view) => `src/views/${view}.ts`);

// Prettier decides how lines look; these rules are about habits and size.
export default tseslint.config(
  { ignores: ["dist", "public"] },
  ...tseslint.configs.recommended,
  {
    rules: {
      eqeqeq: "error",
      "prefer-const": ["error", { destructuring: "all" }],
      "@typescript-eslint/no-unused-vars": ["error", { argsIgnorePattern: "^_", varsIgnorePattern: "^_" }],
    },
  },
  { files: ["src/**/*.ts"], ignores: long, rules: { "max-lines-per-function": ["error", 80] } },
);
