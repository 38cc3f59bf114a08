/** Rows of like pictures that are wrapped into lines of even length: nine as 5 + 4, not as 8 + 1. */

/** The columns of n pictures at least so wide: as few lines as there is room for, of lengths that differ by one at most. */
export function evenColumns(n: number, room: number, least: number, gap: number): number {
  const fit = Math.max(1, Math.floor((room + gap) / (least + gap)));
  return Math.max(1, Math.ceil(n / Math.ceil(n / fit)));
}

/** Sets `--columns` of the rows in a box, now and when its size changes; styles name the least width as `--least`. */
export function keepEven(box: HTMLElement, rows: string): { readonly set: () => void; readonly end: () => void } {
  const set = (): void => {
    for (const row of box.querySelectorAll<HTMLElement>(rows)) {
      const style = getComputedStyle(row);
      const [least, gap] = [parseFloat(style.getPropertyValue("--least")), parseFloat(style.columnGap) || 0];
      const room = row.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      const columns = evenColumns(row.childElementCount, room, least, gap);
      row.style.setProperty("--columns", String(columns));
    }
  };
  const watcher = new ResizeObserver(set);
  watcher.observe(box);
  return { set, end: () => watcher.disconnect() };
}
