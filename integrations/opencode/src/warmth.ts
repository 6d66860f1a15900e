/** Whether a prefix is still in the engine's cache: the moments at which a change of the prompt is free. */

/** `unknown` means nobody between here and the engine said anything: it is neither warm nor cold. */
export type Warmth = "warm" | "cold" | "unknown"

/** The last answer a session got from one model: when it came, and how long its prefix then stays. */
export interface Heard {
  atMs: number
  /** Seconds that an untouched prefix is expected to stay, as last told; null when nobody said. */
  keepS: number | null
}

/** Counted on where a proxy has not told how long it keeps a prefix: its first answer says `cold` and no more. */
const UNTOLD_KEEP_S = 240

/**
 * Read `x-homeport-cache: warm; keep=240s | cold`: what the request found when it came. Whatever it found, its answer
 * has made the prefix warm, so `cold` only says that there is somebody who keeps watch.
 */
export function hear(header: string | null, before: Heard | undefined, nowMs: number): Heard {
  const [word, ...parameters] = (header ?? "").split(";").map((part) => part.trim().toLowerCase())
  const keep = parameters.map((part) => /^keep=(\d+(?:\.\d+)?)s?$/.exec(part)?.[1]).find((value) => value !== undefined)
  if (word === "warm") return { atMs: nowMs, keepS: keep === undefined ? (before?.keepS ?? null) : Number(keep) }
  if (word === "cold") return { atMs: nowMs, keepS: before?.keepS ?? UNTOLD_KEEP_S }
  return { atMs: nowMs, keepS: null }
}

export function warmth(heard: Heard | undefined, nowMs: number): Warmth {
  if (heard === undefined || heard.keepS === null) return "unknown"
  return nowMs < heard.atMs + heard.keepS * 1_000 ? "warm" : "cold"
}

/** Whether a held change should stay held: unknown counts as warm for `assumeWarmS` after the last answer. */
export function holds(heard: Heard | undefined, nowMs: number, assumeWarmS: number): boolean {
  const now = warmth(heard, nowMs)
  if (now !== "unknown") return now === "warm"
  return heard !== undefined && nowMs - heard.atMs < assumeWarmS * 1_000
}

/** Whether what was sent is gone for certain, or was never answered: then even what stands early may be rewritten. */
export function isGone(heard: Heard | undefined, nowMs: number): boolean {
  return heard === undefined || warmth(heard, nowMs) === "cold"
}
