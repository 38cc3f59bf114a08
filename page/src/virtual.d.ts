declare module "virtual:formulas" {
  /** The HTML of each formula of `numbers/formulas.ts`. */
  const drawings: Record<string, string>;
  export default drawings;
}
