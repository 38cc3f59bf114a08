/** What was used last, up to a number of entries. */
export class Recent<V> {
  private readonly kept = new Map<string, V>();

  constructor(private readonly limit: number) {}

  get(key: string): V | undefined {
    const value = this.kept.get(key);
    if (value !== undefined) {
      this.kept.delete(key);
      this.kept.set(key, value);
    }
    return value;
  }

  set(key: string, value: V): void {
    this.kept.delete(key);
    this.kept.set(key, value);
    if (this.kept.size > this.limit) this.kept.delete(this.kept.keys().next().value as string);
  }

  forget(which: (key: string) => boolean): void {
    for (const key of [...this.kept.keys()].filter(which)) this.kept.delete(key);
  }
}
