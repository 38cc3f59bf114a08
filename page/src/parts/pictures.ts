/** What a map shows: the weights of a head, or how those of two heads differ. */

import type { Data, HeadAt, Kind, MapInfo } from "../data";
import { pixelTable, SCALES, signedPixels, signedScale, type ScaleName, type Tone } from "../numbers/colour";
import { fromHalf, halfValues, toHalf } from "../numbers/half";
import { perPixel, tileBlock, type Pyramid } from "../numbers/levels";
import { largestSink, pooledSinks } from "../numbers/sinks";
import { sinksOf, type Context } from "../views/view";

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
  /** The weight of each query on the learned sink; empty without one, or while it is not known. */
  readonly sinks: Float32Array;
  /** The sink's colours in rows [r0, r1) of a level's pixels; of none of them where it is left out. */
  sinkPixels(level: number, r0: number, r1: number): Uint32Array;
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
  sinks: Float32Array = new Float32Array(0);
  /** Of pixels of so many queries. */
  private readonly sinkTops = new Map<string, number>();
  private readonly data: Data;
  private readonly cells: ExactCells;
  private readonly tables = new Map<string, Uint32Array>();

  private constructor(
    private readonly from: Pick<Context, "data" | "scenes">,
    private readonly at: HeadAt,
    public info: MapInfo,
    private rest: Record<Kind, number>,
    public look: Look,
  ) {
    this.data = from.data;
    this.cells = new ExactCells(from.data, at, info);
  }

  static async of(from: Pick<Context, "data" | "scenes">, at: HeadAt, look: Look): Promise<HeadPicture> {
    const info = await from.data.map(at);
    const picture = new HeadPicture(from, at, info, await beyondFirst(from.data, at, info), look);
    await picture.findSinks();
    return picture;
  }

  /** Asks for the sink's weights once the whole map is there: they take the same pass. Resolves to whether they came. */
  private async findSinks(): Promise<boolean> {
    if (this.done < 1 || this.sinks.length) return false;
    this.sinks = await sinksOf(this.from, this.at);
    return this.sinks.length > 0;
  }

  get done(): number {
    return this.info.done;
  }

  async refresh(): Promise<boolean> {
    const before = this.top(0);
    this.info = await this.data.map(this.at);
    this.rest = await beyondFirst(this.data, this.at, this.info);
    return (await this.findSinks()) || this.top(0) > before * FARTHER;
  }

  top(level: number): number {
    const { kind, hide } = this.look;
    const ofKeys = (hide ? this.rest[kind] : this.info.maximum[kind][level]) || 1;
    return hide ? ofKeys : Math.max(ofKeys, this.sinkTop(level));
  }

  /** The largest weight on the sink in a level's pixels. */
  private sinkTop(level: number): number {
    const step = perPixel(this.info, level);
    const { kind } = this.look;
    const name = `${kind} ${step}`;
    let top = this.sinkTops.get(name);
    if (top === undefined) {
      top = largestSink(this.sinks, step, kind);
      if (this.sinks.length) this.sinkTops.set(name, top);
    }
    return top;
  }

  sinkPixels(level: number, r0: number, r1: number): Uint32Array {
    if (this.look.hide) return new Uint32Array(r1 - r0);
    const table = this.table(level);
    return Uint32Array.from(this.sinksAt(level, r0, r1), (weight) => table[toHalf(weight)]);
  }

  /** The weights on the sink in rows of a level's pixels. */
  sinksAt(level: number, r0: number, r1: number): Float32Array {
    return pooledSinks(this.sinks, perPixel(this.info, level), this.look.kind, r0, r1);
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

  /** The sink's weights in the first head less those in the second. */
  get sinks(): Float32Array {
    const [a, b] = this.pictures.map(({ sinks }) => sinks);
    return Float32Array.from(a.length ? a : b, (_, i) => (a[i] ?? 0) - (b[i] ?? 0));
  }

  sinkPixels(level: number, r0: number, r1: number): Uint32Array {
    if (this.look.hide) return new Uint32Array(r1 - r0);
    const [a, b] = this.pictures.map((picture) => picture.sinksAt(level, r0, r1));
    const difference = a.map((weight, r) => (weight || 0) - (b[r] || 0));
    return signedPixels(difference, signedScale(this.look.scale), this.top(level), this.look.tone);
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
