/** Whether a session's prefix is still in the engine's cache: the moments at which a change of the prompt is free. */

/** `unknown` means nobody between here and the engine said anything: it is neither warm nor cold. */
export type Warmth = "warm" | "cold" | "unknown"

/** What the last answer said, with the time it was heard. */
export interface Heard {
  atMs: number
  /** Until when the prefix is kept as far as the proxy knows; null when the answer carried no word of it. */
  keepUntilMs: number | null
}

/** Read `x-homeport-cache: warm; keep=240s | cold`; anything else is no word at all. */
export function hear(header: string | null, nowMs: number): Heard {
  const [word, ...parameters] = (header ?? "").split(";").map((part) => part.trim().toLowerCase())
  if (word === "cold") return { atMs: nowMs, keepUntilMs: nowMs }
  const keep = parameters.map((part) => /^keep=(\d+(?:\.\d+)?)s?$/.exec(part)?.[1]).find((value) => value !== undefined)
  if (word !== "warm" || keep === undefined) return { atMs: nowMs, keepUntilMs: null }
  return { atMs: nowMs, keepUntilMs: nowMs + Number(keep) * 1_000 }
}

export function warmth(heard: Heard | null, nowMs: number): Warmth {
  if (heard === null || heard.keepUntilMs === null) return "unknown"
  return nowMs < heard.keepUntilMs ? "warm" : "cold"
}

/** Whether a held change should stay held: unknown counts as warm for `assumeWarmS` after the last answer. */
export function holds(heard: Heard | null, nowMs: number, assumeWarmS: number): boolean {
  const now = warmth(heard, nowMs)
  if (now !== "unknown") return now === "warm"
  return heard !== null && nowMs - heard.atMs < assumeWarmS * 1_000
}
