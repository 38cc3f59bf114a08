import { load } from "./bars.js";

const HEADS = 4;
const D = 16;
const find = (id) => document.getElementById(id);

/** Numbers between −1 and 1 that look random and are the same for the same seed. */
function noise(seed) {
  const x = Math.sin(seed * 12.9898) * 43758.5453;
  return 2 * (x - Math.floor(x)) - 1;
}

/** A vector for each letter, the same for the same letter: (HEADS, letters, D). */
function embedded(text, sharpness) {
  const made = new Float32Array(HEADS * text.length * D);
  for (let h = 0; h < HEADS; h++) {
    for (let n = 0; n < text.length; n++) {
      const at = (h * text.length + n) * D;
      for (let a = 0; a < D; a++) made[at + a] = sharpness * noise(text.charCodeAt(n) * 31 + a + 1);
    }
  }
  return made;
}

/** With the identity as values, the output is the weights: (HEADS, letters, letters). */
function weights(attention, text) {
  const n = text.length;
  const identity = new Float32Array(HEADS * n * n);
  for (let h = 0; h < HEADS; h++) for (let j = 0; j < n; j++) identity[(h * n + j) * n + j] = 1;
  return attention({ q: embedded(text, 2), k: embedded(text, 2), v: identity, heads: HEADS, d: D });
}

function draw(canvas, map, n) {
  canvas.width = canvas.height = n;
  const image = new ImageData(n, n);
  map.forEach((weight, at) => image.data.set([30, 60, 140, Math.round(255 * Math.sqrt(weight))], 4 * at));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function show(attention) {
  const text = find("text").value.slice(0, 300);
  const n = text.length;
  if (n === 0) return;
  const { out, entropy } = weights(attention, text);
  find("maps").replaceChildren(
    ...Array.from({ length: HEADS }, (_, h) => {
      const figure = document.createElement("figure");
      const canvas = document.createElement("canvas");
      draw(canvas, out.subarray(h * n * n, (h + 1) * n * n), n);
      const mean = entropy.subarray(h * n, (h + 1) * n).reduce((sum, x) => sum + x, 0) / n;
      const caption = document.createElement("figcaption");
      caption.textContent = `head ${h}: ${Math.exp(mean).toFixed(1)} letters`;
      figure.append(canvas, caption);
      return figure;
    }),
  );
}

function measure(attention) {
  const n = 2048;
  const x = Float32Array.from({ length: HEADS * n * 64 }, (_, at) => noise(at));
  const begun = performance.now();
  attention({ q: x, k: x, v: x, heads: HEADS, d: 64 });
  find("report").textContent = `${(performance.now() - begun).toFixed(0)} ms`;
}

try {
  const attention = await load("bars.wasm");
  show(attention);
  find("text").addEventListener("input", () => show(attention));
  find("measure").addEventListener("click", () => measure(attention));
} catch (error) {
  find("report").textContent = error.message;
}
