/** Places of a text in tokens. */

/** The tokens [from, to) that each place of a text lies in, in order; letters in both cases are alike. */
export function placesOf(tokens: readonly string[], text: string): [from: number, to: number][] {
  const sought = text.toLowerCase();
  if (!sought) return [];
  const starts: number[] = [];
  let joined = "";
  for (const token of tokens) {
    starts.push(joined.length);
    joined += token.toLowerCase();
  }
  const places: [number, number][] = [];
  let token = 0;
  for (let at = joined.indexOf(sought); at >= 0; at = joined.indexOf(sought, at + sought.length)) {
    while (token + 1 < starts.length && starts[token + 1] <= at) token++;
    let to = token + 1;
    while (to < starts.length && starts[to] < at + sought.length) to++;
    places.push([token, to]);
  }
  return places;
}

/** The number of the next place after a token, or of the one before it, around the end. */
export function nextPlace(places: readonly (readonly [number, number])[], token: number, back: boolean): number {
  const n = places.length;
  if (!back)
    return Math.max(
      0,
      places.findIndex(([from]) => from > token),
    );
  const before = places.findLastIndex(([from]) => from < token);
  return before < 0 ? n - 1 : before;
}
