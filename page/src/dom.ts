/** Elements in one line each. */

type Child = Node | string | null | undefined | false;
type Props = Record<string, string | number | boolean | ((event: never) => void) | undefined>;

/** Attributes are set as given, `true` as an empty one; a function listens to the event of its name. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  dress(element, props);
  element.append(
    ...children.filter((child): child is Node | string => child !== null && child !== undefined && child !== false),
  );
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function s<K extends keyof SVGElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Node[]
): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, tag);
  dress(element, props);
  element.append(...children);
  return element;
}

function dress(element: Element, props: Props): void {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** A labelled list to choose from. */
export function choice(
  label: string,
  options: readonly (readonly [value: string, text: string])[],
  value: string,
  pick: (value: string) => void,
): HTMLLabelElement {
  const select = h(
    "select",
    { "aria-label": label, "data-focus": label, change: () => pick(select.value) },
    ...options.map(([v, text]) => h("option", { value: v }, text)),
  );
  select.value = value;
  return h("label", { class: "field" }, h("span", {}, label), select);
}

/** A labelled box to tick. */
export function tick(
  label: string,
  checked: boolean,
  set: (checked: boolean) => void,
  title?: string,
): HTMLLabelElement {
  const box = h("input", { type: "checkbox", change: () => set(box.checked) });
  box.checked = checked;
  return h("label", { class: "tick", title }, box, h("span", {}, label));
}

/** Draws anew what is in a box. What had the focus there keeps it, by its `data-focus`. */
export function redraw(box: HTMLElement, ...children: Child[]): void {
  const active = box.contains(document.activeElement) ? document.activeElement?.getAttribute("data-focus") : null;
  box.replaceChildren(...children.filter((child): child is Node | string => Boolean(child)));
  if (active) box.querySelector<HTMLElement>(`[data-focus="${CSS.escape(active)}"]`)?.focus();
}

/** A canvas as large as its element in device pixels, its context scaled to CSS pixels. */
export function fitted(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d") as CanvasRenderingContext2D;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  return context;
}

/** A dotted name that may be broken after its dots and underscores, and only there. */
export const breakable = (name: string): Node[] =>
  name.split(/(?<=[._])/).flatMap((part, k) => [...(k ? [h("wbr", {})] : []), document.createTextNode(part)]);

/** What a reader does to see more of a thing: a finger has no place to rest above it. */
export const pointing = (): string => (matchMedia("(hover: hover)").matches ? "Point at" : "Tap");

/** Scrolls a box until an element in it is seen. Unlike scrollIntoView, leaves the place from which Tab goes on. */
export function reveal(box: HTMLElement, element: Element): void {
  const [outer, inner] = [box.getBoundingClientRect(), element.getBoundingClientRect()];
  box.scrollLeft += Math.min(0, inner.left - outer.left) + Math.max(0, inner.right - outer.right);
  box.scrollTop += Math.min(0, inner.top - outer.top) + Math.max(0, inner.bottom - outer.bottom);
}

/** Calls at most once a frame. */
export function perFrame(call: () => void): () => void {
  let asked = 0;
  return () => {
    if (asked) return;
    asked = requestAnimationFrame(() => {
      asked = 0;
      call();
    });
  };
}
