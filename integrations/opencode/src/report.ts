/** The books as a person reads them, and as a script does. */

import { total, type Books, type Break } from "./books.js"
import type { Reason } from "./outline.js"
import type { SessionState } from "./store.js"
import { warmth } from "./warmth.js"

const WHY: Record<Reason, string> = {
  none: "nothing changed",
  cold_start: "the first request",
  model_changed: "another model",
  tools_reordered: "the tools came in another order",
  tools_added: "tools were added",
  tools_removed: "tools were taken away",
  tool_schema_changed: "a tool's definition changed",
  system_changed: "the system prompt changed",
  history_truncated: "the history was cut or compacted",
  history_edited: "an earlier message changed",
  routed_elsewhere: "another backend answered",
  expired: "the prefix had expired",
  evicted: "the engine no longer had it",
}

/** What `opencode-homeport report --json` prints: one session with its sub-agents. */
export interface Summary {
  session: string
  agents: number
  updated_at: string
  requests: number
  side_requests: number
  input_tokens: number
  cached_tokens: number | null
  cached_share: number | null
  output_tokens: number
  cost_usd: number
  saved_usd: number | null
  lost_tokens: number
  lost_usd: number | null
  breaks: { at: string; reason: Reason; place: string; lost_tokens: number; lost_usd: number | null }[]
  held: { late: string[]; gone: string[]; changed: string[] }
  backend: string | null
  cache: "warm" | "cold" | "unknown"
}

/** Sum up a family of sessions; the first is the one the report is named after. */
export function summarise(family: SessionState[], nowMs: number): Summary | undefined {
  const head = family.find((state) => state.session === state.root) ?? family[0]
  if (!head) return undefined
  const sum = total(family.map((state) => state.books))
  return {
    session: head.session,
    agents: family.length,
    updated_at: head.updatedAt,
    requests: sum.requests,
    side_requests: sum.sideRequests,
    input_tokens: sum.inputTokens,
    cached_tokens: sum.cachedTokens,
    cached_share: share(sum),
    output_tokens: sum.outputTokens,
    cost_usd: sum.costUsd,
    saved_usd: sum.savedUsd,
    lost_tokens: sum.lostTokens,
    lost_usd: sum.lostUsd,
    breaks: sum.breaks.map((entry) => ({
      at: entry.at,
      reason: entry.reason,
      place: entry.place,
      lost_tokens: entry.lostTokens,
      lost_usd: entry.lostUsd,
    })),
    held: head.held,
    backend: head.backend,
    cache: warmth(head.heard[head.model], nowMs),
  }
}

function share(books: Books): number | null {
  return books.cachedTokens === null || books.inputTokens === 0 ? null : books.cachedTokens / books.inputTokens
}

const number = (value: number): string => value.toLocaleString("en-US")
const usd = (value: number): string => `$${value.toFixed(value !== 0 && Math.abs(value) < 0.01 ? 4 : 2)}`

/** The report as plain text with one fact a line. */
export function render(summary: Summary): string {
  const cached =
    summary.cached_share === null || summary.cached_tokens === null
      ? "not reported by this provider"
      : `${number(summary.cached_tokens)} of ${number(summary.input_tokens)} prompt tokens (${(summary.cached_share * 100).toFixed(1)} %)`
  const lines = [
    `Homeport: session ${summary.session}`,
    `requests   ${number(summary.requests)}${summary.agents > 1 ? ` by ${summary.agents} agents` : ""}, ${number(summary.side_requests)} on the side`,
    `cached     ${cached}`,
    `cost       ${usd(summary.cost_usd)}${summary.saved_usd === null ? "" : `, saved by the cache ${usd(summary.saved_usd)}`}`,
    `lost       ${number(summary.lost_tokens)} tokens in ${summary.breaks.length} breaks${summary.lost_usd === null ? "" : `, ${usd(summary.lost_usd)}`}`,
    ...summary.breaks.slice(-5).map((entry) => `  ${entry.at.slice(0, 19)}Z  ${number(entry.lost_tokens)} tokens: ${WHY[entry.reason]}${entry.place ? ` (${entry.place})` : ""}`),
  ]
  if (summary.cache !== "unknown") lines.push(`prefix     ${summary.cache}${summary.backend ? ` on ${summary.backend}` : ""}`)
  if (summary.held.late.length) lines.push(`held back  ${summary.held.late.join(", ")} until a moment when it costs nothing; "/homeport take" takes them now`)
  if (summary.held.gone.length) lines.push(`kept       ${summary.held.gone.join(", ")} though gone, until a moment when it costs nothing`)
  return lines.join("\n")
}

/** One sentence for a toast. */
export function breakMessage(entry: Break): string {
  const price = entry.lostUsd === null ? "" : ` (${usd(entry.lostUsd)})`
  return `${number(entry.lostTokens)} tokens${price} were computed again: ${WHY[entry.reason]}.`
}
