/** IEEE half floats: how tiles travel, and how they are kept. */

const VALUES = new Float32Array(65536);
for (let bits = 0; bits < 65536; bits++) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const size =
    exponent === 31
      ? fraction
        ? NaN
        : Infinity
      : exponent
        ? 2 ** (exponent - 15) * (1 + fraction / 1024)
        : 2 ** -14 * (fraction / 1024);
  VALUES[bits] = bits >> 15 ? -size : size;
}

/** The value of every pattern of 16 bits. */
export const halfValues: Readonly<Float32Array> = VALUES;

export const NAN_BITS = 0x7e00;

export function fromHalf(bits: Uint16Array): Float32Array {
  return Float32Array.from(bits, (b) => VALUES[b]);
}

const float = new Float32Array(1);
const word = new Uint32Array(float.buffer);

/** The nearest half float, ties to even. */
export function toHalf(value: number): number {
  float[0] = value;
  const sign = (word[0] >>> 16) & 0x8000;
  const magnitude = word[0] & 0x7fffffff;
  if (magnitude > 0x7f800000) return NAN_BITS;
  if (magnitude >= 0x47800000) return sign | 0x7c00;
  if (magnitude < 0x38800000) return sign | roundEven(Math.abs(float[0]) * 2 ** 24);
  return sign | roundEven((magnitude - 0x38000000) / 2 ** 13);
}

function roundEven(value: number): number {
  const floor = Math.floor(value);
  const rest = value - floor;
  return rest > 0.5 || (rest === 0.5 && floor % 2 === 1) ? floor + 1 : floor;
}
