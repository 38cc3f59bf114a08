/** The outline of a head's map, as `regard.viewer.data.outlines` defines it, for texts that are typed. */

import type { Told, Words } from "../data";
import { count, printable, scoreText, weightText } from "../numbers/format";
import { quoted } from "../parts/sentences";
import { copiesOf, DISTANCES, LEAST_ROWS, NOTABLE } from "./heads";

/** A shape holds that many times the weight that even attention would give it, at least. */
const ABOVE_CHANCE = 1.5;
/** The normalized entropy from which on weights are called even. */
const EVEN = 0.9;
/** Median weight of a column, at least. */
const STEADY = 0.1;
/** Weight from which on a query is named with a key. */
const FEWEST = 0.1;
const MOST_COLUMNS = 2;
const MOST_CLAIMS = 4;
const MOST_KEYS = 2;
const MOST_QUERIES = 2;
const IN_COLUMN = 3;

type Name = keyof Words["claims"];

interface Pair {
  query: number;
  key: number;
  weight: number;
}

/** A shape of a map and the mean weight in it; `key`: of a column, or the distance of a line. */
export interface Claim {
  name: Name;
  share: number;
  key: number;
  pairs: Pair[];
}

/** All weights of a head on n tokens, row by row, 0 where a key is hidden. */
export interface Map {
  weights: Float32Array;
  ids: Uint8Array;
  prefix: number;
  causal: boolean;
}

/** A claim, and the cells that it is about. */
interface Shape {
  claim: Claim;
  cells: Uint8Array;
}

const claimOf = (name: Name, share: number, key = 0, pairs: Pair[] = []): Claim => ({ name, share, key, pairs });
const places = (n: number): number[] => Array.from({ length: n }, (_, k) => k);
const hundredths = (x: number): number => Math.round(100 * x);

class Outline {
  private readonly n: number;

  constructor(private readonly map: Map) {
    this.n = map.ids.length;
  }

  /** What is said of the map, the claims that cover most weight first. */
  claims(): Claim[] {
    const evenness = this.evenness();
    if (evenness >= EVEN) return [claimOf("even", evenness)];
    const shapes = [...this.columns(), ...this.lines(), ...this.stripes()].map((shape) => ({
      ...shape,
      mass: this.massOf(shape.cells),
    }));
    const claimed = new Uint8Array(this.n * this.n);
    const accepted: Claim[] = [];
    for (const { claim, cells, mass } of shapes.sort((a, b) => hundredths(b.mass) - hundredths(a.mass))) {
      const columns = accepted.filter(({ name }) => name === "column").length;
      const room = accepted.length < MOST_CLAIMS && !(claim.name === "column" && columns === MOST_COLUMNS);
      const fresh = this.massOf(cells.map((one, at) => one & (1 - claimed[at])));
      if (!room || fresh < mass / 2) continue;
      accepted.push(claim);
      cells.forEach((one, at) => (claimed[at] |= one));
    }
    return [...accepted, ...this.heaviest(claimed, accepted.length ? NOTABLE : 0)];
  }

  private seen(i: number): number {
    return this.map.causal ? i + 1 : this.n;
  }

  /** The mean weight in cells over the rows that see two keys or more. */
  private massOf(cells: Uint8Array): number {
    let [sum, rows] = [0, 0];
    for (let i = 0; i < this.n; i++) {
      if (this.seen(i) < 2) continue;
      rows++;
      for (let j = 0; j < this.seen(i); j++) if (cells[i * this.n + j]) sum += this.map.weights[i * this.n + j];
    }
    return sum / Math.max(1, rows);
  }

  private cellsOf(holds: (i: number, j: number) => boolean): Uint8Array {
    const cells = new Uint8Array(this.n * this.n);
    for (let i = 0; i < this.n; i++) for (let j = 0; j < this.seen(i); j++) cells[i * this.n + j] = holds(i, j) ? 1 : 0;
    return cells;
  }

  /** The mean weight in cells over the rows that have any, null if it is small or not above chance. */
  private notable(cells: Uint8Array, least = 1): number | null {
    let [rows, share, chance] = [0, 0, 0];
    for (let i = 0; i < this.n; i++) {
      const own = places(this.n).filter((j) => cells[i * this.n + j]);
      if (!own.length || this.seen(i) < 2) continue;
      rows++;
      share += own.reduce((sum, j) => sum + this.map.weights[i * this.n + j], 0);
      chance += own.length / this.seen(i);
    }
    if (rows < least || !rows) return null;
    return share / rows >= Math.max(NOTABLE, (ABOVE_CHANCE * chance) / rows) ? share / rows : null;
  }

  private columns(): Shape[] {
    const counted = places(this.n).filter((i) => this.seen(i) >= 2);
    const least = Math.max(3, Math.floor(counted.length / 3));
    return places(this.n).flatMap((key) => {
      const rows = counted.filter((i) => i !== key && key < this.seen(i));
      const column = rows.map((i) => this.map.weights[i * this.n + key]);
      if (!(column.reduce((sum, x) => sum + x, 0) / column.length >= NOTABLE)) return [];
      const cells = this.cellsOf((i, j) => j === key && i !== key && this.seen(i) >= 2);
      const share = this.notable(cells, key ? least : 1);
      if (share === null || (key && median(column) < STEADY)) return [];
      const pairs = key
        ? this.pairs(key, (i) => (cells[i * this.n + key] ? this.map.weights[i * this.n + key] : 0))
        : [];
      return [{ claim: claimOf(key ? "column" : "sink", share, key, pairs), cells }];
    });
  }

  private lines(): Shape[] {
    const lines: [number, Name][] = [[1, "previous"], [0, "current"], [-1, "next"], ...backs];
    return lines.flatMap(([by, name]) => {
      const cells = this.cellsOf((i, j) => i - j === by);
      const share = this.notable(cells, name === "back" ? LEAST_ROWS : 1);
      return share === null ? [] : [{ claim: claimOf(name, share, Math.abs(by)), cells }];
    });
  }

  private stripes(): Shape[] {
    const { ids, prefix } = this.map;
    const [runs, copies] = [copiesOf(ids, prefix), copiesOf(ids, 1)];
    const stripes: [Name, Uint8Array][] = [
      ["induction", this.cellsOf((i, j) => runs[i].includes(j - 1))],
      ["duplicate", this.cellsOf((i, j) => copies[i].includes(j))],
    ];
    return stripes.flatMap(([name, cells]) => {
      const share = this.notable(cells);
      return share === null ? [] : [{ claim: claimOf(name, share), cells }];
    });
  }

  private evenness(): number {
    let [sum, rows] = [0, 0];
    for (let i = 0; i < this.n; i++) {
      if (this.seen(i) < 2) continue;
      rows++;
      for (const w of this.map.weights.subarray(i * this.n, (i + 1) * this.n))
        if (w > 0) sum -= (w * Math.log(w)) / Math.log(this.seen(i));
    }
    return rows ? sum / rows : 0;
  }

  /** The heaviest weights outside of other claims, by key, and the queries that they are of. */
  private heaviest(claimed: Uint8Array, least: number): Claim[] {
    const { weights } = this.map;
    const rest = (i: number, j: number): number => (claimed[i * this.n + j] ? 0 : weights[i * this.n + j]);
    const far = (i: number, j: number): number => (j > 0 && Math.abs(i - j) > 1 ? rest(i, j) : 0);
    const peakBy = (of: (i: number, j: number) => number): number[] =>
      places(this.n).map((j) => places(this.n).reduce((most, i) => Math.max(most, of(i, j)), 0));
    const away = peakBy(far);
    const apart = least > 0 || away.some((peak) => peak > 0);
    const peaks = apart ? away : peakBy(rest);
    const pairs: Pair[] = [];
    for (const key of falling(peaks).slice(0, MOST_KEYS)) {
      if (peaks[key] < Math.max(least, pairs.length ? FEWEST : 0)) break;
      pairs.push(...this.pairs(key, (i) => (apart && i === key ? 0 : rest(i, key)), MOST_QUERIES));
    }
    return pairs.length ? [claimOf("heaviest", pairs[0].weight, pairs[0].key, pairs)] : [];
  }

  /** The heaviest weights on a key that are worth naming. */
  private pairs(key: number, weight: (i: number) => number, most = IN_COLUMN): Pair[] {
    const column = places(this.n).map(weight);
    const best = falling(column)
      .slice(0, most)
      .filter((i) => column[i] > 0);
    const enough = best.filter((i) => column[i] >= FEWEST);
    return (enough.length ? enough : best.slice(0, 1)).map((query) => ({ query, key, weight: column[query] }));
  }
}

const backs = DISTANCES.map((by): [number, Name] => [by, "back"]);

const falling = (x: readonly number[]): number[] => places(x.length).sort((a, b) => x[b] - x[a]);

function median(x: readonly number[]): number {
  const sorted = [...x].sort((a, b) => a - b);
  const middle = sorted.length / 2;
  return (sorted[Math.ceil(middle) - 1] + sorted[Math.floor(middle)]) / 2;
}

export const outlineOf = (map: Map): Claim[] => new Outline(map).claims();

/** The claims that look alike: the second of them is "another". */
const ALIKE: Partial<Record<Name, string>> = { sink: "column", column: "column", previous: "below", back: "below" };

/** Claims in words. */
export function told(claims: readonly Claim[], tokens: readonly string[], causal: boolean, words: Words): Told[] {
  const name = (at: number): string => {
    const only = tokens.filter((token) => token === tokens[at]).length === 1;
    return only ? quoted(tokens[at]) : `${count(at)} ${quoted(tokens[at])}`;
  };
  const named: readonly Name[] = ["sink", "column", "heaviest"];
  return claims.map(({ name: kind, share, key, pairs }, place) => {
    const alike = claims
      .slice(0, place)
      .some((before) => ALIKE[kind] !== undefined && ALIKE[before.name] === ALIKE[kind]);
    const keys = [...new Set(pairs.map((pair) => pair.key))];
    const listed = keys.map((one) => {
      const own = pairs.filter((pair) => pair.key === one);
      const text = own.map(({ query, weight }) => `${weightText(weight)} from ${name(query)}`).join(", ");
      return kind === "column" ? text : `${name(one)} (${text})`;
    });
    return {
      name: kind,
      parts: {
        share: scoreText(share),
        key: named.includes(kind) ? name(key) : String(key),
        token: named.includes(kind) ? printable(tokens[key]) : String(key),
        from: listed.join(" and "),
        others: words.others[causal ? 0 : 1],
        its: words.heaviest[place ? 1 : 0],
        a: words.articles[alike ? 1 : 0],
      },
    };
  });
}
