/** Formulas of a weight step by step, which KaTeX draws when the page is built. N stands for any number. */
export const FORMULAS = [
  String.raw`q_{N}`,
  String.raw`k_{N}`,
  String.raw`q_{N,a}\,k_{N,a}`,
  String.raw`q_{N}\cdot k_{N}=\sum_a q_{N,a}\,k_{N,a}`,
  String.raw`s_{N,N}=\frac{N}{\sqrt{N}}\;q_{N}\cdot k_{N}`,
  String.raw`s_{N,N}=N\;q_{N}\cdot k_{N}`,
  String.raw`s_{N,N}=-N\;q_{N}\cdot k_{N}`,
  String.raw`s_{N,N}\leftarrow f(s_{N,N},N,N)`,
  String.raw`s_{N,N}\leftarrow s_{N,N}+b_{N,N}`,
  String.raw`s_{N,N}`,
  String.raw`s_{N,N}\leftarrow-\infty`,
  String.raw`\mathrm{lse}_{N}=\log\left(\sum_j e^{s_{N,j}}\right)`,
  String.raw`\mathrm{lse}_{N}=\log\left(\sum_j e^{s_{N,j}}+e^{\mathrm{sink}}\right)`,
  String.raw`p_{N,\mathrm{sink}}=e^{\mathrm{sink}-\mathrm{lse}_{N}}`,
  String.raw`p_{N,N}=e^{s_{N,N}-\mathrm{lse}_{N}}`,
  String.raw`v_{N}`,
  String.raw`p_{N,N}\,v_{N}`,
  String.raw`o_{N}=\sum_j p_{N,j}\,v_j`,
];

const NUMBER = /\d+(?:\.\d+)?(?:e[+-]?\d+)?/g;

/** The number that stands for the k-th N where a formula is drawn. */
const standIn = (k: number): string => String(700_001 + k);

/** A formula whose N are numbers that it does not have otherwise. */
export function numbered(formula: string): string {
  let k = 0;
  return formula.replaceAll("N", () => standIn(k++));
}

/** The drawing of a formula with numbers, of those of formulas with N; undefined where there is none. */
export function drawn(formula: string, drawings: Record<string, string>): string | undefined {
  const numbers = formula.match(NUMBER) ?? [];
  return drawings[formula.replace(NUMBER, "N")]?.replace(
    /70000\d|70001\d/g,
    (found) => numbers[Number(found) - 700_001],
  );
}
