/** One JSON file per session: what was frozen, what was heard, and the books. It survives restarts and may be read by scripts. */

import { mkdirSync, readFileSync, readdirSync, renameSync, rmSync, statSync, writeFileSync } from "node:fs"
import { join } from "node:path"
import { put } from "./bounded.js"
import { emptyBooks, type Books } from "./books.js"
import type { Outline } from "./outline.js"
import type { JsonObject } from "./prompt.js"
import type { Heard } from "./warmth.js"

/** Digests of a conversation's first two messages; the second is null until there is one. */
export type Head = [string, string | null]

/** The environment block as one model of a session was first told of it. */
export interface Frozen {
  environment: string
  /** The block as the model was last told of it, by the first message or by a note. */
  told: string
  /** Sentences placed behind later user turns, by the turn's number; once sent they stay. */
  notes: { turn: number; text: string }[]
}

/** Tools and system text as first sent for one agent under one model. */
export interface Lane {
  tools: JsonObject[]
  system: string[]
  outline: Outline
  promptTokens: number | null
}

export interface SessionState {
  version: 2
  session: string
  parent: string | null
  root: string
  agent: string
  model: string
  updatedAt: string
  /** The last answer by model: each has a cache of its own. */
  heard: Record<string, Heard>
  backend: string | null
  /** The model's context length, as OpenCode knows it. */
  contextTokens: number | null
  /** Prunes OpenCode made before this moment are let through. */
  prunedUntilMs: number
  /** By model, like `frozen`: a compaction begins a conversation with another head. */
  heads: Record<string, Head>
  frozen: Record<string, Frozen>
  lanes: Record<string, Lane>
  held: { late: string[]; gone: string[]; changed: string[] }
  books: Books
}

/** Files hold the rest. */
const KEPT_IN_MEMORY = 64

/** What starts a file name must be a session id and nothing that leaves the folder. */
const ID = /^[A-Za-z0-9_-]{1,128}$/

export class Store {
  readonly #folder: string
  readonly #known = new Map<string, SessionState>()

  constructor(
    dataDir: string,
    readonly maxSessions: number,
  ) {
    this.#folder = join(dataDir, "sessions")
  }

  /** The session's state: from memory, from its file, or new. */
  open(session: string, nowMs: number): SessionState {
    const known = this.#known.get(session) ?? this.#read(session) ?? fresh(session, nowMs)
    put(this.#known, session, known, KEPT_IN_MEMORY)
    return known
  }

  /** Write the state so that a reader never sees half a file. */
  save(state: SessionState, nowMs: number): void {
    if (!ID.test(state.session)) return
    state.updatedAt = new Date(nowMs).toISOString()
    mkdirSync(this.#folder, { recursive: true, mode: 0o700 })
    const path = this.#path(state.session)
    const partial = `${path}.${process.pid}.tmp`
    writeFileSync(partial, `${JSON.stringify(state)}\n`, { mode: 0o600 })
    renameSync(partial, path)
  }

  /** The session and its sub-agents, by what lies in the folder. */
  family(root: string): SessionState[] {
    return this.all().filter((state) => state.root === root || state.session === root)
  }

  all(): SessionState[] {
    return this.#files()
      .map((name) => this.#read(name.slice(0, -".json".length)))
      .filter((state) => state !== undefined)
      .sort((a, b) => b.updatedAt.localeCompare(a.updatedAt))
  }

  /** Remove the oldest files beyond the limit. */
  sweep(): void {
    const aged = this.#files()
      .map((name) => ({ name, at: statSync(join(this.#folder, name), { throwIfNoEntry: false })?.mtimeMs ?? 0 }))
      .sort((a, b) => b.at - a.at)
    for (const { name } of aged.slice(this.maxSessions)) rmSync(join(this.#folder, name), { force: true })
  }

  #files(): string[] {
    try {
      return readdirSync(this.#folder).filter((name) => name.endsWith(".json"))
    } catch {
      return [] // no folder yet: nothing was ever saved
    }
  }

  #read(session: string): SessionState | undefined {
    if (!ID.test(session)) return undefined
    try {
      const state = JSON.parse(readFileSync(this.#path(session), "utf8")) as SessionState
      return state.version === 2 && state.session === session ? state : undefined
    } catch {
      return undefined // absent or damaged: begin anew rather than fail the request
    }
  }

  #path(session: string): string {
    return join(this.#folder, `${session}.json`)
  }
}

function fresh(session: string, nowMs: number): SessionState {
  return {
    version: 2,
    session,
    parent: null,
    root: session,
    agent: "",
    model: "",
    updatedAt: new Date(nowMs).toISOString(),
    heard: {},
    backend: null,
    contextTokens: null,
    prunedUntilMs: nowMs,
    heads: {},
    frozen: {},
    lanes: {},
    held: { late: [], gone: [], changed: [] },
    books: emptyBooks(),
  }
}
