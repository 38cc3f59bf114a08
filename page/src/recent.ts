/** What was used last, up to a number of entries. */
export class Recent<V> {
  private readonly kept = new Map<string, V>();

  /** dropped: told of what goes for something newer. */
  constructor(
    private readonly limit: number,
    private readonly dropped: (key: string) => void = () => {},
  ) {}

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
    if (this.kept.size <= this.limit) return;
    const oldest = this.kept.keys().next().value as string;
    this.kept.delete(oldest);
    this.dropped(oldest);
  }

  forget(which: (key: string) => boolean): void {
    for (const key of [...this.kept.keys()].filter(which)) this.kept.delete(key);
  }
}
