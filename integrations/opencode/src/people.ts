/** Who a session belongs to: its parent and the root of its family, learned from events or asked from OpenCode. */

import { put } from "./bounded.js"

/** The one question we ask of OpenCode's client. */
export type AskParent = (session: string) => Promise<string | null>

const KEPT = 4_096
/** Sub-agents of sub-agents end somewhere; a circle in the data must not hang a request. */
const DEEPEST = 16

export class People {
  readonly #parents = new Map<string, string | null>()

  constructor(readonly ask: AskParent) {}

  /** From `session.created` and `session.updated`. */
  learn(session: string, parent: string | null): void {
    put(this.#parents, session, parent, KEPT)
  }

  async parent(session: string): Promise<string | null> {
    const known = this.#parents.get(session)
    if (known !== undefined) return known
    const parent = await this.ask(session)
    this.learn(session, parent)
    return parent
  }

  async root(session: string): Promise<string> {
    let at = session
    for (let depth = 0; depth < DEEPEST; depth++) {
      const parent = await this.parent(at)
      if (parent === null) return at
      at = parent
    }
    return at
  }
}

/** Agents that speak on the side of a session: their prompts share nothing with it. */
const SIDE = new Set(["title", "summary", "compaction"])

export function kindOf(agent: string, parent: string | null): "main" | "side" | "subagent" {
  if (SIDE.has(agent)) return "side"
  return parent === null ? "main" : "subagent"
}
