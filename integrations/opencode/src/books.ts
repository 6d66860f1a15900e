/** The books of one session: what its prompts held, what the cache saved, what breaks lost and why. */

import type { Reason } from "./outline.js"

/** Prices in USD per million tokens; null where the model has none. */
export interface Price {
  inputUsd: number | null
  cachedUsd: number | null
}

export interface Break {
  at: string
  reason: Reason
  place: string
  lostTokens: number
  /** null when the model has no price. */
  lostUsd: number | null
}

export interface Books {
  requests: number
  sideRequests: number
  inputTokens: number
  /** null as long as no answer has reported cached tokens: unknown is not zero. */
  cachedTokens: number | null
  outputTokens: number
  costUsd: number
  savedUsd: number | null
  lostTokens: number
  lostUsd: number | null
  breaks: Break[]
}

/** Tokens of one answer as OpenCode counts them: `input` is without what was read from or written to the cache. */
export interface StepTokens {
  input: number
  output: number
  cache: { read: number; write: number }
}

/** Breaks kept in full per session; the sums go on. */
const KEPT_BREAKS = 50
/** What block sizes and tokenizer seams lose without any change: below this a difference is no break. */
const SEAM_TOKENS = 512
const SEAM_SHARE = 0.05

export function emptyBooks(): Books {
  return {
    requests: 0,
    sideRequests: 0,
    inputTokens: 0,
    cachedTokens: null,
    outputTokens: 0,
    costUsd: 0,
    savedUsd: null,
    lostTokens: 0,
    lostUsd: null,
    breaks: [],
  }
}

export function promptTokens(tokens: StepTokens): number {
  return tokens.input + tokens.cache.read + tokens.cache.write
}

function discount(tokens: number, price: Price): number | null {
  if (price.inputUsd === null || price.cachedUsd === null) return null
  return (tokens * (price.inputUsd - price.cachedUsd)) / 1e6
}

const plus = (sum: number | null, more: number | null): number | null => (more === null ? sum : (sum ?? 0) + more)

/** Enter one answer; `reported` says whether the provider told cached tokens at all. */
export function enter(books: Books, tokens: StepTokens, costUsd: number, price: Price, reported: boolean): void {
  books.requests += 1
  books.inputTokens += promptTokens(tokens)
  books.outputTokens += tokens.output
  books.costUsd += costUsd
  if (!reported) return
  books.cachedTokens = (books.cachedTokens ?? 0) + tokens.cache.read
  books.savedUsd = plus(books.savedUsd, discount(tokens.cache.read, price))
}

/** Tokens the previous prompt had in common with this one by order, but that were computed again; 0 is no break. */
export function lostTokens(previousPrompt: number | null, tokens: StepTokens): number {
  if (previousPrompt === null) return 0
  const expected = Math.min(previousPrompt, promptTokens(tokens))
  const lost = expected - tokens.cache.read
  return lost > Math.max(SEAM_TOKENS, expected * SEAM_SHARE) ? lost : 0
}

export function enterBreak(books: Books, at: string, reason: Reason, place: string, lost: number, price: Price): Break {
  const entry: Break = { at, reason, place, lostTokens: lost, lostUsd: discount(lost, price) }
  books.lostTokens += lost
  books.lostUsd = plus(books.lostUsd, entry.lostUsd)
  books.breaks = [...books.breaks, entry].slice(-KEPT_BREAKS)
  return entry
}

/** Several sessions' books as one: a session with its sub-agents. */
export function total(all: Books[]): Books {
  const sum = emptyBooks()
  for (const books of all) {
    sum.requests += books.requests
    sum.sideRequests += books.sideRequests
    sum.inputTokens += books.inputTokens
    sum.cachedTokens = plus(sum.cachedTokens, books.cachedTokens)
    sum.outputTokens += books.outputTokens
    sum.costUsd += books.costUsd
    sum.savedUsd = plus(sum.savedUsd, books.savedUsd)
    sum.lostTokens += books.lostTokens
    sum.lostUsd = plus(sum.lostUsd, books.lostUsd)
    sum.breaks.push(...books.breaks)
  }
  sum.breaks.sort((a, b) => a.at.localeCompare(b.at))
  return sum
}
