/** What a map shows: the weights of a head, or how those of two heads differ. */

import type { Data, HeadAt, Kind, MapInfo } from "../data";
import { pixelTable, SCALES, signedPixels, signedScale, type ScaleName, type Tone } from "../numbers/colour";
import { fromHalf, halfValues } from "../numbers/half";
import { tileBlock, type Pyramid } from "../numbers/levels";

export interface Look {
  kind: Kind;
  tone: Tone;
  scale: ScaleName;
  /** Whether the first column of pixels is left out. */
  hide: boolean;
}

export interface Pixels {
  rows: number;
  cols: number;
  /** Whether all are there; those that are not are striped. */
  whole: boolean;
  /** RGBA, little endian, row-major. */
  data: Uint32Array;
}

export interface Picture {
  readonly info: Pyramid;
  /** The share of it that is there, as far as it takes a pass over all pairs. */
  readonly done: number;
  look: Look;
  /** Asks how far it is; resolves to whether the colour scale has another end now. */
  refresh(): Promise<boolean>;
  pixels(level: number, x: number, y: number): Promise<Pixels>;
  /** The number at the end of the colour scale. */
  top(level: number): number;
  readonly signed: boolean;
  /** An exact number, or undefined while it is fetched; `arrived` is called when it is there. */
  exact(i: number, j: number, arrived: () => void): number | undefined;
}

const CELL = 64;

/** Infinite: not computed yet. */
const UNKNOWN = 0x7c00;

/** So much farther the end of a scale has to be, for all to be coloured anew. */
const FARTHER = 1.02;

/** Stripes where nothing is known, which is no colour of any scale. */
function stripe(at: number, cols: number): number {
  return (((at % cols) + Math.floor(at / cols)) >> 2) & 1 ? 0xffd2cec9 : 0xffe4e1de;
}

/** Exact weights by blocks, at once where they are here. */
class ExactCells {
  private readonly here = new Map<string, Float32Array | null>();

  constructor(
    private readonly data: Data,
    private readonly at: HeadAt,
    private readonly info: Pyramid,
  ) {}

  get(i: number, j: number, arrived: () => void): number | undefined {
    const [r0, c0] = [i - (i % CELL), j - (j % CELL)];
    const [r1, c1] = [Math.min(this.info.n_q, r0 + CELL), Math.min(this.info.n_k, c0 + CELL)];
    const name = `${r0},${c0}`;
    const block = this.here.get(name);
    if (block) return block[(i - r0) * (c1 - c0) + j - c0];
    if (block === undefined) {
      if (this.here.size > 256) this.here.clear();
      this.here.set(name, null);
      this.data.values(this.at, r0, r1, c0, c1).then(
        (values) => {
          this.here.set(name, values);
          arrived();
        },
        () => this.here.delete(name),
      );
    }
    return undefined;
  }
}

export class HeadPicture implements Picture {
  readonly signed = false;
  private readonly cells: ExactCells;
  private readonly tables = new Map<string, Uint32Array>();

  private constructor(
    private readonly data: Data,
    private readonly at: HeadAt,
    public info: MapInfo,
    private rest: Record<Kind, number>,
    public look: Look,
  ) {
    this.cells = new ExactCells(data, at, info);
  }

  static async of(data: Data, at: HeadAt, look: Look): Promise<HeadPicture> {
    const info = await data.map(at);
    return new HeadPicture(data, at, info, await beyondFirst(data, at, info), look);
  }

  get done(): number {
    return this.info.done;
  }

  async refresh(): Promise<boolean> {
    const before = this.top(0);
    this.info = await this.data.map(this.at);
    this.rest = await beyondFirst(this.data, this.at, this.info);
    return this.top(0) > before * FARTHER;
  }

  top(level: number): number {
    const { kind, hide } = this.look;
    return (hide ? this.rest[kind] : this.info.maximum[kind][level]) || 1;
  }

  async pixels(level: number, x: number, y: number): Promise<Pixels> {
    const { rows, cols } = tileBlock(this.info, level, x, y);
    const { kind, hide } = this.look;
    const table = this.table(level);
    const { bits, exact } = await this.data.tile(this.at, level, x, y, kind);
    const data = new Uint32Array(rows * cols);
    for (let p = 0; p < data.length; p++) data[p] = table[bits[p]];
    if (!exact) bits.forEach((b, p) => b === UNKNOWN && (data[p] = stripe(p, cols)));
    if (hide && x === 0) for (let p = 0; p < data.length; p += cols) data[p] = 0;
    return { rows, cols, whole: exact, data };
  }

  exact(i: number, j: number, arrived: () => void): number | undefined {
    return this.cells.get(i, j, arrived);
  }

  private table(level: number): Uint32Array {
    const { tone, scale } = this.look;
    const top = this.top(level);
    const name = `${scale} ${tone} ${top}`;
    let table = this.tables.get(name);
    if (!table) {
      if (this.tables.size > 16) this.tables.clear();
      table = pixelTable(SCALES[scale], top, tone);
      this.tables.set(name, table);
    }
    return table;
  }
}

/** The largest number of the whole map outside of the first column, as far as it is known. */
async function beyondFirst(data: Data, at: HeadAt, info: Pyramid): Promise<Record<Kind, number>> {
  const { cols } = tileBlock(info, 0, 0, 0);
  const top = async (kind: Kind): Promise<number> =>
    (await data.tile(at, 0, 0, 0, kind)).bits.reduce(
      (most, b, p) => (p % cols && b !== UNKNOWN && halfValues[b] > most ? halfValues[b] : most),
      0,
    );
  const [mass, max] = await Promise.all([top("mass"), top("max")]);
  return { mass, max };
}

export class DifferencePicture implements Picture {
  readonly signed = true;
  readonly info: MapInfo;
  private readonly cells: [ExactCells, ExactCells];

  constructor(
    private readonly data: Data,
    private readonly a: HeadAt,
    private readonly b: HeadAt,
    private readonly pictures: [HeadPicture, HeadPicture],
    public look: Look,
  ) {
    this.info = pictures[0].info;
    this.cells = [new ExactCells(data, a, this.info), new ExactCells(data, b, this.info)];
  }

  get done(): number {
    return Math.min(...this.pictures.map((picture) => picture.done));
  }

  async refresh(): Promise<boolean> {
    return (await Promise.all(this.pictures.map((picture) => picture.refresh()))).some(Boolean);
  }

  top(level: number): number {
    return Math.max(...this.pictures.map((picture) => picture.top(level)));
  }

  async pixels(level: number, x: number, y: number): Promise<Pixels> {
    const { rows, cols } = tileBlock(this.info, level, x, y);
    const tiles = [this.a, this.b].map((at) => this.data.tile(at, level, x, y, this.look.kind));
    const halves = await Promise.all(tiles);
    const [a, b] = halves.map(({ bits }) => fromHalf(bits));
    // Where one of the two sees nothing its weight is 0; where neither does there is nothing to draw.
    const difference = a.map((value, p) => (Number.isNaN(value) ? -b[p] : Number.isNaN(b[p]) ? value : value - b[p]));
    if (this.look.hide && x === 0) for (let p = 0; p < difference.length; p += cols) difference[p] = NaN;
    const data = signedPixels(difference, signedScale(this.look.scale), this.top(level), this.look.tone);
    const whole = halves.every(({ exact }) => exact);
    if (!whole) data.forEach((_, p) => (a[p] === Infinity || b[p] === Infinity) && (data[p] = stripe(p, cols)));
    return { rows, cols, whole, data };
  }

  exact(i: number, j: number, arrived: () => void): number | undefined {
    const [a, b] = this.cells.map((cells) => cells.get(i, j, arrived));
    return a === undefined || b === undefined ? undefined : (a || 0) - (b || 0);
  }
}
