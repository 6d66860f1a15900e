/** The tool list held still: a server that is late or gone must not cost the whole history. */

import { toolName, type JsonObject } from "./prompt.js"

export interface Steady {
  /** What to send. */
  tools: JsonObject[]
  /** Offered now, but not sent until the cache is cold. */
  late: string[]
  /** Not offered now, but still sent. */
  gone: string[]
  /** Offered with another definition than the one sent. */
  changed: string[]
}

/** The list as first sent, whatever is offered now; `late`, `gone` and `changed` say what is being held. */
export function steady(sent: JsonObject[], offered: JsonObject[]): Steady {
  const now = new Map(offered.map((tool) => [toolName(tool), tool]))
  const before = new Set(sent.map(toolName))
  return {
    tools: sent,
    late: [...now.keys()].filter((name) => !before.has(name)),
    gone: [...before].filter((name) => !now.has(name)),
    changed: sent.filter((tool) => differs(tool, now.get(toolName(tool)))).map(toolName),
  }
}

export function isHolding(state: Steady): boolean {
  return state.late.length + state.gone.length + state.changed.length > 0
}

// cache marks move between turns by design and are no part of a definition
const withoutMarks = (key: string, value: unknown): unknown => (key === "cache_control" ? undefined : value)

function differs(sent: JsonObject, offered: JsonObject | undefined): boolean {
  return offered !== undefined && JSON.stringify(sent, withoutMarks) !== JSON.stringify(offered, withoutMarks)
}
