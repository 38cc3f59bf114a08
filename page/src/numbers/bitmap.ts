/** Pictures in grey as files: BMP, which every browser reads and a few lines write. */

const [FILE_HEADER, HEADER, PALETTE] = [14, 40, 4 * 256];

/** A file of pixels (height, width) in grey, from 0 to 255. */
export function bmpOf(pixels: Uint8Array, width: number): ArrayBuffer {
  const height = pixels.length / width;
  const stride = Math.ceil(width / 4) * 4;
  const start = FILE_HEADER + HEADER + PALETTE;
  const bytes = new Uint8Array(start + stride * height);
  const view = new DataView(bytes.buffer);
  view.setUint16(0, 0x424d);
  view.setUint32(2, bytes.length, true);
  view.setUint32(10, start, true);
  view.setUint32(14, HEADER, true);
  view.setInt32(18, width, true);
  view.setInt32(22, -height, true); // from the top down
  view.setUint16(26, 1, true);
  view.setUint16(28, 8, true);
  for (let grey = 0; grey < 256; grey++)
    bytes.fill(grey, FILE_HEADER + HEADER + 4 * grey, FILE_HEADER + HEADER + 4 * grey + 3);
  for (let y = 0; y < height; y++) bytes.set(pixels.subarray(y * width, (y + 1) * width), start + y * stride);
  return bytes.buffer;
}
