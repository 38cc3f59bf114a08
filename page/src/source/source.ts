/** Raw numbers; `exact`: all of them are there, and none is an estimate. */
export interface Numbers {
  data: ArrayBuffer;
  exact: boolean;
}

/** How far an answer is that takes its time. */
export interface Working {
  /** The share that is done; null: nobody has answered for a while. */
  share: number | null;
  /** What is done before there is anything to ask about, where there is more to say than the share. */
  stage?: string;
  /** How many steps the stage has; 0: they are not counted. */
  total?: number;
}

/** Where answers come from. Paths are those of the server, whoever answers. */
export interface Source {
  readonly kind: "server" | "file" | "notebook";
  /** What has to be known of its numbers, if anything. */
  readonly note?: string;
  /** Told how far an answer is that takes its time, and a share of 1 when it is there. */
  progress: (working: Working) => void;
  json(path: string): Promise<unknown>;
  /** Raw numbers: half floats for tiles and thumbnails, float32 for everything else. */
  numbers(path: string): Promise<Numbers>;
  post(path: string, body: unknown): Promise<unknown>;
}

/** An answer that says no, in a sentence for people. */
export class Refused extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** An answer, or the refusal in its place. */
export const orRefused = <T>(answer: Promise<T>): Promise<T | Refused> =>
  answer.catch((error: unknown) => {
    if (error instanceof Refused) return error;
    throw error;
  });

/** Nobody answers. */
export class Gone extends Error {}

/** The sentence of an error answer. */
export function refusal(body: unknown, status: number): Refused {
  const said = (body as { error?: unknown } | null)?.error;
  return new Refused(typeof said === "string" ? said : `The answer was an error (${status}).`, status);
}

/** Answers that are still computed say 202 and how far they are. */
export async function whenReady(
  ask: () => Promise<{ status: number; body: unknown }>,
  progress: (working: Working) => void,
): Promise<unknown> {
  let waited = false;
  for (let wait = 60; ; wait = Math.min(1000, wait * 1.5)) {
    const { status, body } = await ask();
    if (status !== 202) {
      if (waited) progress({ share: 1 });
      return body;
    }
    waited = true;
    const { progress: share = 0, stage, total } = body as { progress?: number; stage?: string; total?: number };
    progress({ share, stage, total });
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
