/** What single providers want beside the session headers, by the host a request goes to. */

import type { Options } from "./options.js"

interface Wish {
  host: RegExp
  /** Wants `prompt_cache_key` in the body. */
  cacheKey?: true
  /** Wants the session under a header of its own. */
  header?: string
}

/** From the providers' documentation; hosts that route by `x-session-affinity` or `x-session-id` need no entry. */
const WISHES: Wish[] = [
  { host: /(^|\.)openai\.com$/, cacheKey: true },
  { host: /\.openai\.azure\.com$/, cacheKey: true },
  { host: /(^|\.)moonshot\.(ai|cn)$/, cacheKey: true },
  { host: /(^|\.)mistral\.ai$/, cacheKey: true, header: "x-affinity" },
  { host: /(^|\.)x\.ai$/, cacheKey: true, header: "x-grok-conv-id" },
  { host: /(^|\.)fireworks\.ai$/, cacheKey: true },
  { host: /(^|\.)cerebras\.ai$/, cacheKey: true },
]

function wish(url: string): Wish | undefined {
  const host = URL.canParse(url) ? new URL(url).hostname : ""
  return WISHES.find((entry) => entry.host.test(host))
}

export function wantsCacheKey(url: string, providerID: string, option: Options["promptCacheKey"]): boolean {
  if (typeof option === "boolean") return option
  if (Array.isArray(option)) return option.includes(providerID)
  return wish(url)?.cacheKey === true
}

export function ownHeader(url: string): string | undefined {
  return wish(url)?.header
}
