/** The page of somebody else that ours is a part of: the cell of a notebook. */

const SETTLES_MS = 400;

/** Whether a host is dark: its letters are light, whatever it calls its theme. */
export function isDark(host: HTMLElement): boolean {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  if (!context) return false;
  context.fillStyle = getComputedStyle(host).color;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 127;
}

/** Calls when the host may have changed its theme; returns what ends that. */
export function watchTheme(changed: () => void): () => void {
  let timer = 0;
  const observer = new MutationObserver(() => {
    changed();
    window.clearTimeout(timer);
    timer = window.setTimeout(changed, SETTLES_MS); // style sheets come later than the names of themes
  });
  for (const element of [document.documentElement, document.body]) observer.observe(element, { attributes: true });
  return () => {
    window.clearTimeout(timer);
    observer.disconnect();
  };
}

/** Keeps keys that are typed here from being the host's commands ("d d" deletes a cell), but for those that lead out. */
export function keepKeys(event: KeyboardEvent): void {
  const leadsOut = event.key === "Escape" || (event.key === "Enter" && event.shiftKey);
  if (!event.ctrlKey && !event.metaKey && !event.altKey && !leadsOut) event.stopPropagation();
}
