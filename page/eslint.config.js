import tseslint from "typescript-eslint";

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
  { files: ["src/**/*.ts"], rules: { "max-lines-per-function": ["error", 80] } },
);
