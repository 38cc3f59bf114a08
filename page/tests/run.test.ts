import { beforeEach, expect, it } from "vitest";

import type { Answer, Run } from "../python/messages";
import { Session, type Block, type Port, type State } from "../python/session";

/** A Python that answers when the test says so. */
class Python implements Port {
  onmessage: Port["onmessage"] = null;
  onerror: Port["onerror"] = null;
  readonly asked: Run[] = [];
  ended = false;

  postMessage(run: Run): void {
    this.asked.push(run);
  }

  terminate(): void {
    this.ended = true;
  }

  says(...answers: Answer[]): void {
    for (const data of answers) this.onmessage!({ data });
  }
}

const DONE: Answer = { kind: "done", ok: true };
const FAILED: Answer = { kind: "done", ok: false };

let sources: string[];
let said: string[];
let pythons: Python[];
let state: State;
let session: Session;
const sent = (): string[] => pythons.at(-1)!.asked.map((run) => run.source);

beforeEach(() => {
  [sources, said, pythons] = [["a", "b", "c"], [], []];
  const blocks = sources.map((_, n): Block => ({
    source: () => sources[n]!,
    started: () => said.push(`${n} started`),
    show: ({ kind, content }) => said.push(`${n} ${kind} ${content}`),
    ended: (how) => said.push(`${n} ${how}`),
  }));
  const open = (): Port => pythons[pythons.push(new Python()) - 1]!;
  session = new Session(blocks, open, (now) => (state = now));
});

it("runs the blocks above first, once", () => {
  session.run(1);
  pythons[0]!.says({ kind: "ready" }, { kind: "text", content: "x" }, DONE, DONE);
  expect(said).toEqual(["0 started", "0 text x", "0 done", "1 started", "1 done"]);
  session.run(2);
  pythons[0]!.says(DONE);
  expect(pythons[0]!.asked).toEqual([
    { name: "block 1", source: "a" },
    { name: "block 2", source: "b" },
    { name: "block 3", source: "c" },
  ]);
});

it("runs again from the first block that was edited", () => {
  session.run(2);
  pythons[0]!.says(DONE, DONE, DONE);
  sources[1] = "B";
  session.run(2);
  pythons[0]!.says(DONE, DONE);
  expect(sent()).toEqual(["a", "b", "c", "B", "c"]);
  session.run(0);
  pythons[0]!.says(DONE);
  expect(sent().slice(5)).toEqual(["a"]);
});

it("stops at an error and runs that block again", () => {
  session.run(1);
  pythons[0]!.says({ kind: "error", content: "NameError" }, FAILED);
  expect(state).toEqual({ asked: null, loading: expect.anything() });
  session.run(1);
  expect(sent()).toEqual(["a", "a"]);
});

it("runs one block at a time", () => {
  session.run(0);
  session.run(2);
  expect(sent()).toEqual(["a"]);
  expect(state.asked).toBe(0);
});

it("starts anew after a stop", () => {
  session.run(0);
  pythons[0]!.says({ kind: "ready" }, DONE);
  session.run(1);
  session.stop();
  expect(pythons[0]!.ended).toBe(true);
  expect(said.at(-1)).toBe("1 stopped");
  pythons[0]!.says({ kind: "text", content: "late" });
  expect(said.at(-1)).toBe("1 stopped");
  session.run(1);
  expect(pythons).toHaveLength(2);
  expect(sent()).toEqual(["a"]);
});

it("says why Python cannot run", () => {
  session.run(0);
  pythons[0]!.says({ kind: "loading", loaded: 1, total: 2 });
  expect(state.loading).toMatchObject({ loaded: 1, total: 2 });
  pythons[0]!.says({ kind: "failed", why: "numpy.bin is missing (404)" });
  expect(said.slice(1)).toEqual(["0 error Python cannot run here: numpy.bin is missing (404)", "0 failed"]);
  expect(state).toEqual({ asked: null, loading: null });
});
