"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const { n, labels, causal, kinds } = data;
const el = (id) => document.getElementById(id);
const state = { ...data.choice, way: "to", weights: null, cursor: null, view: { row: 0, col: 0, size: n } };
const dark = matchMedia("(prefers-color-scheme: dark)");
const number = (w) => (w > 0 && w < 5e-5 ? "< 0.0001" : w.toFixed(4));
const seen = (query, key) => !causal || key <= query;

// ---- colours: 256 steps between the anchors, by the square root of the weight -------------------------------------
let palette, style;
function setColours() {
  const anchors = data.ramps[dark.matches ? "dark" : "light"].map((hex) => [0, 2, 4].map((k) => parseInt(hex.slice(k, k + 2), 16)));
  palette = Array.from({ length: 256 }, (_, step) => {
    const at = (step / 255) * (anchors.length - 1), low = Math.min(Math.floor(at), anchors.length - 2);
    return anchors[low].map((c, k) => Math.round(c + (anchors[low + 1][k] - c) * (at - low)));
  });
  const css = getComputedStyle(document.documentElement);
  style = Object.fromEntries(["ink", "soft", "line", "accent"].map((name) => [name, css.getPropertyValue("--" + name).trim()]));
}
const colour = (weight) => palette[Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, weight))))];
function inkOn([r, g, b]) {
  const linear = (c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) > 0.18 ? "#101010" : "#f8f8f8";
}

// ---- weights: 16-bit steps, deflated, unpacked when a head is first looked at ---------------------------------------
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const unpacked = new Map();
async function weightsOf(layer, head) {
  const at = layer * data.heads + head;
  if (!unpacked.has(at)) {
    const stream = new Blob([bytes(data.weights[at])]).stream().pipeThrough(new DecompressionStream("deflate"));
    unpacked.set(at, new Uint16Array(await new Response(stream).arrayBuffer()));
  }
  const steps = unpacked.get(at), scale = data.scales[at];
  return causal
    ? (query, key) => steps[(query * (query + 1)) / 2 + key] * scale
    : (query, key) => steps[query * n + key] * scale;
}

// ---- overview -----------------------------------------------------------------------------------------------------
const buttons = [];
function buildOverview() {
  const grid = el("overview");
  grid.style.gridTemplateColumns = `1.6em repeat(${data.heads}, minmax(22px, 1fr))`;
  const label = (text) => grid.appendChild(Object.assign(document.createElement("span"), { textContent: text }));
  label("");
  for (let head = 0; head < data.heads; head++) label("H" + head);
  for (let layer = 0; layer < data.layers; layer++) {
    label("L" + layer);
    for (let head = 0; head < data.heads; head++) {
      const button = document.createElement("button"), at = buttons.length;
      button.type = "button";
      button.title = `layer ${layer}, head ${head}` + kinds.map((k) => `\n${k.name} ${score(k, layer, head)}`).join("");
      button.setAttribute("aria-label", button.title.replaceAll("\n", ", "));
      button.appendChild(document.createElement("canvas"));
      button.addEventListener("click", () => chooseHead(layer, head));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -data.heads, ArrowDown: data.heads }[event.key];
        if (!step) return;
        event.preventDefault();
        buttons[at + step]?.focus();
      });
      grid.appendChild(button);
      buttons.push(button);
    }
  }
}
const score = (kind, layer, head) => {
  const value = kind.scores[layer][head];
  return value === null ? "–" : value.toFixed(2);
};
function drawOverview() {
  buttons.forEach((button, at) => {
    const canvas = button.firstChild, side = data.side, steps = bytes(data.thumbnails[at]);
    canvas.width = canvas.height = side;
    const image = new ImageData(side, side);
    for (let k = 0; k < steps.length; k++)
      if (steps[k] < 255) image.data.set([...palette[Math.round((steps[k] * 255) / 254)], 255], 4 * k);
    canvas.getContext("2d").putImageData(image, 0, 0);
  });
}

// ---- map ------------------------------------------------------------------------------------------------------------
const map = el("map"), frame = { left: 0, top: 0, side: 0, cell: 0 };
const GAP = 6;
function drawMap() {
  if (!state.weights) return;
  const ratio = devicePixelRatio || 1, width = Math.floor(map.clientWidth), context = map.getContext("2d");
  const font = (size) => `${size}px system-ui, "DejaVu Sans", sans-serif`;
  const { row, col, size } = state.view;
  context.font = font(11);
  const longest = Math.max(...Array.from({ length: size }, (_, k) => Math.max(context.measureText(labels[row + k]).width, context.measureText(labels[col + k]).width)));
  const named = (width - 40) / size >= 7.5;
  const margin = Math.ceil(named ? Math.min(longest, width / 5) : context.measureText(String(n)).width) + GAP;
  const side = width - margin - GAP;
  Object.assign(frame, { left: margin, top: margin, side, cell: side / size });
  map.width = map.height = Math.round(width * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.imageSmoothingEnabled = false;

  // A pixel stands for one weight, or, where there are more weights than pixels, for the largest that falls on it.
  const pixels = Math.min(size, Math.round(frame.side * ratio)), image = new ImageData(pixels, pixels);
  const start = (k) => Math.floor((k * size) / pixels);
  for (let y = 0; y < pixels; y++) for (let x = 0; x < pixels; x++) {
    let largest = -1;
    for (let query = row + start(y); query < row + start(y + 1); query++)
      for (let key = col + start(x); key < col + start(x + 1); key++)
        if (seen(query, key)) largest = Math.max(largest, state.weights(query, key));
    if (largest >= 0) image.data.set([...colour(largest), 255], 4 * (y * pixels + x));
  }
  const sheet = document.createElement("canvas");
  sheet.width = sheet.height = pixels;
  sheet.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(sheet, frame.left, frame.top, frame.side, frame.side);
  context.strokeStyle = style.line;
  context.strokeRect(frame.left + 0.5, frame.top + 0.5, frame.side - 1, frame.side - 1);

  const every = named ? 1 : 10 ** Math.ceil(Math.log10((size * 34) / frame.side));
  context.font = font(named ? Math.min(12, Math.max(8.5, frame.cell * 0.8)) : 11);
  context.textBaseline = "middle";
  for (let k = 0; k < size; k++) {
    const at = (k + 0.5) * frame.cell;
    for (const [index, across] of [[row + k, false], [col + k, true]]) {
      const marked = index === (across ? state.cursor?.key : state.cursor?.query ?? state.token);
      if (index % every && !marked) continue;
      context.fillStyle = marked || (!across && index === state.token) ? style.accent : style.soft;
      context.save();
      if (across) { context.translate(frame.left + at, frame.top - GAP); context.rotate(-Math.PI / 2); context.textAlign = "left"; }
      else { context.translate(frame.left - GAP, frame.top + at); context.textAlign = "right"; }
      if (across && named && longest <= 1.3 * frame.cell) { context.rotate(Math.PI / 2); context.textAlign = "center"; context.translate(0, -GAP); }
      if (named || !(index % every)) context.fillText(named ? labels[index] : index, 0, 0, margin - GAP);
      context.restore();
    }
  }
  const outline = (query, key, wide, tall, ink) => {
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.beginPath();
    context.save();
    context.rect(frame.left, frame.top, frame.side, frame.side);
    context.clip();
    context.strokeRect(frame.left + (key - col) * frame.cell, frame.top + (query - row) * frame.cell, wide * frame.cell, tall * frame.cell);
    context.restore();
  };
  outline(state.token, 0, causal ? state.token + 1 : n, 1, style.accent);
  if (state.cursor) outline(state.cursor.query, state.cursor.key, 1, 1, style.ink);
}
function readout() {
  const at = state.cursor;
  if (!at) { el("readout").textContent = "\u00a0"; return; }
  const pair = `${at.query} “${labels[at.query]}” → ${at.key} “${labels[at.key]}”`;
  el("readout").textContent = `${pair}: ${seen(at.query, at.key) ? number(state.weights(at.query, at.key)) : "not visible"}`;
}
function cellAt(event) {
  const box = map.getBoundingClientRect();
  const key = state.view.col + Math.floor((event.clientX - box.left - frame.left) / frame.cell);
  const query = state.view.row + Math.floor((event.clientY - box.top - frame.top) / frame.cell);
  const inside = (at, from) => at >= from && at < from + state.view.size;
  return inside(query, state.view.row) && inside(key, state.view.col) ? { query, key } : null;
}
function point(cursor) {
  state.cursor = cursor;
  readout();
  requestAnimationFrame(drawMap);
}
function look(size, at = state.cursor ?? { query: state.token, key: state.view.col + state.view.size / 2 }) {
  const { row, col, size: before } = state.view;
  size = Math.max(Math.min(8, n), Math.min(n, Math.round(size)));
  const keep = (start, index) => Math.max(0, Math.min(n - size, Math.round(index - ((index - start) * size) / before)));
  state.view = { row: keep(row, at.query), col: keep(col, at.key), size };
  drawMap();
}
function move(rows, cols) {
  const { row, col, size } = state.view, within = (at) => Math.max(0, Math.min(n - size, at));
  state.view = { row: within(row + rows), col: within(col + cols), size };
}
let drag = null;
map.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, y: event.clientY, ...state.view, moved: false }; });
map.addEventListener("pointermove", (event) => {
  if (drag && state.view.size < n && event.pointerType === "mouse") {
    const rows = (drag.y - event.clientY) / frame.cell, cols = (drag.x - event.clientX) / frame.cell;
    drag.moved ||= Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4;
    if (drag.moved) { state.view = { ...state.view, row: drag.row, col: drag.col }; move(Math.round(rows), Math.round(cols)); }
  }
  point(cellAt(event));
});
map.addEventListener("pointerleave", () => { drag = null; point(null); });
map.addEventListener("pointerup", (event) => {
  const cell = cellAt(event), moved = drag?.moved;
  drag = null;
  if (cell && !moved) { point(cell); chooseToken(state.way === "to" ? cell.query : cell.key); }
});
map.addEventListener("dblclick", (event) => look(state.view.size / 2, cellAt(event) ?? undefined));
map.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (step) {
    const { query, key } = state.cursor ?? { query: state.token, key: state.token };
    const next = { query: Math.max(0, Math.min(n - 1, query + step[0])), key: Math.max(0, Math.min(n - 1, key + step[1])) };
    const { row, col, size } = state.view, beyond = (at, from) => Math.min(0, at - from) + Math.max(0, at - from - size + 1);
    move(beyond(next.query, row), beyond(next.key, col));
    point(next);
  } else if (event.key === "Enter" || event.key === " ") chooseToken(state.way === "to" ? state.cursor?.query ?? state.token : state.cursor?.key ?? state.token);
  else if (event.key === "+" || event.key === "=") look(state.view.size / 2);
  else if (event.key === "-") look(state.view.size * 2);
  else if (event.key === "Escape") { look(n); point(null); }
  else return;
  event.preventDefault();
});
el("in").addEventListener("click", () => look(state.view.size / 2));
el("out").addEventListener("click", () => look(state.view.size * 2));
el("whole").addEventListener("click", () => look(n));

// ---- text -----------------------------------------------------------------------------------------------------------
const tokens = [...el("text").children];
tokens.forEach((token, k) => token.addEventListener("click", () => chooseToken(k)));
el("text").addEventListener("keydown", (event) => {
  const next = { ArrowLeft: state.token - 1, ArrowUp: state.token - 1, ArrowRight: state.token + 1, ArrowDown: state.token + 1, Home: 0, End: n - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  chooseToken(Math.max(0, Math.min(n - 1, next)));
});
function shade() {
  const { token, way } = state, from = way === "from";
  const weight = (k) => (from ? (seen(k, token) ? state.weights(k, token) : -1) : seen(token, k) ? state.weights(token, k) : -1);
  tokens.forEach((span, k) => {
    const w = weight(k), tint = w >= 0.002 ? colour(w) : null;
    span.style.background = tint ? `rgb(${tint})` : "";
    span.style.color = tint ? inkOn(tint) : w < 0 ? style.soft : "";
    span.setAttribute("aria-selected", k === token);
  });
  el("text").setAttribute("aria-activedescendant", tokens[token].id);
  el("most-title").textContent = `${token} “${labels[token]}” ${from ? "is attended to most by" : "attends most to"}`;
  const order = Array.from({ length: n }, (_, k) => k).sort((a, b) => weight(b) - weight(a)).slice(0, 8).filter((k) => weight(k) >= 5e-4);
  el("most").replaceChildren(...order.map((k) => {
    const item = document.createElement("li"), button = document.createElement("button");
    const name = document.createElement("b"), place = document.createElement("small"), bar = document.createElement("meter"), value = document.createElement("output");
    name.append(labels[k] + " ", place);
    place.textContent = k;
    bar.value = weight(k);
    value.textContent = number(weight(k));
    button.type = "button";
    button.append(name, bar, value);
    button.addEventListener("click", () => chooseToken(k));
    item.append(button);
    return item;
  }));
}
document.querySelectorAll('input[name="way"]').forEach((input) => input.addEventListener("change", () => { state.way = input.value; shade(); }));

// ---- choosing ---------------------------------------------------------------------------------------------------------
function chooseToken(token) {
  state.token = token;
  const { row, size } = state.view;
  if (token < row || token >= row + size) move(token - row - Math.floor(size / 2), 0);
  shade();
  drawMap();
  reveal();
}
function reveal() {
  const box = el("text"), span = tokens[state.token];
  const above = span.offsetTop - box.offsetTop - box.scrollTop;
  if (above < 0 || above > box.clientHeight - 30) box.scrollTop += above - box.clientHeight / 2;
}
async function chooseHead(layer, head) {
  const weights = await weightsOf(layer, head);
  Object.assign(state, { layer, head, weights });
  buttons.forEach((button, at) => {
    const chosen = at === layer * data.heads + head;
    button.setAttribute("aria-pressed", chosen);
    button.tabIndex = chosen ? 0 : -1;
  });
  el("map-title").textContent = `Layer ${layer}, head ${head}`;
  el("kinds").textContent = kinds.slice(0, 3).map((k) => `${k.name} ${score(k, layer, head)}`).join("  ·  ");
  map.setAttribute("aria-label", `Attention map of layer ${layer}, head ${head}`);
  readout();
  shade();
  drawMap();
}
document.querySelectorAll("button[data-head]").forEach((button) =>
  button.addEventListener("click", () => chooseHead(...button.dataset.head.split(" ").map(Number))));

function drawScale() {
  const canvas = el("scale"), context = canvas.getContext("2d");
  canvas.width = 256;
  canvas.height = 1;
  palette.forEach((c, k) => { context.fillStyle = `rgb(${c})`; context.fillRect(k, 0, 1, 1); });
}
function drawAll() {
  setColours();
  drawOverview();
  drawScale();
  if (state.weights) { shade(); drawMap(); }
}
buildOverview();
drawAll();
dark.addEventListener("change", drawAll);
new ResizeObserver(() => requestAnimationFrame(drawMap)).observe(map.parentElement);
chooseHead(state.layer, state.head).then(reveal);
})();
