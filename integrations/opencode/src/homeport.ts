/** One plugin instance: names who speaks, carries each request out and its answer back, keeps the books. */

import { put } from "./bounded.js"
import { enter, enterBreak, lostTokens, promptTokens, type Break, type Price, type StepTokens } from "./books.js"
import { modelOf, prepare, type Prepared, type Sender } from "./keeper.js"
import type { Options } from "./options.js"
import type { Reason } from "./outline.js"
import { kindOf, type People } from "./people.js"
import { apiOf, type Api, type JsonObject } from "./prompt.js"
import { ownHeader, wantsCacheKey } from "./providers.js"
import { answer, asked, withoutReports } from "./reply.js"
import { breakMessage, render, summarise } from "./report.js"
import type { SessionState, Store } from "./store.js"
import { hear, holds, warmth, type Warmth } from "./warmth.js"
import { watchUsage } from "./wire.js"

/** A sender with what OpenCode knows of the model's price and size. */
export interface Speaker extends Sender {
  price: Price
  contextTokens: number | null
}

/** Tell the person something; never throws. */
export type Tell = (message: string, variant: "info" | "warning") => void

/** A request on its way, until OpenCode has counted its tokens. */
interface Underway {
  prepared: Prepared | null
  speaker: Speaker
  before: { warmth: Warmth; backend: string | null }
  reported: boolean
}

/** Requests on their way at once, with room: tickets, steps, sessions. */
const KEPT = 512
/** Prunes are let through when the prompt fills this much of the context, warm or not. */
const FULL_SHARE = 0.8

export class Homeport {
  readonly #speakers = new Map<string, Speaker>()
  readonly #underway = new Map<string, Underway>()
  readonly #finished = new Map<string, string>()
  readonly #release = new Set<string>()
  #tickets = 0
  #blindTold = false

  constructor(
    readonly instance: string,
    readonly options: Options,
    readonly store: Store,
    readonly people: People,
    readonly tell: Tell,
    readonly now: () => number = Date.now,
  ) {}

  /** Headers for one request, and a ticket by which its way out is recognised. */
  async announce(
    from: Omit<Speaker, "parent" | "root" | "kind">,
  ): Promise<{ ticket: string; headers: Record<string, string> }> {
    const parent = await this.people.parent(from.session)
    const root = await this.people.root(from.session)
    const speaker: Speaker = { ...from, parent, root, kind: kindOf(from.agent, parent) }
    const ticket = `${this.instance}.${++this.#tickets}`
    put(this.#speakers, ticket, speaker, KEPT)
    const headers: Record<string, string> = {
      "x-session-affinity": from.session,
      "x-session-id": from.session,
      "x-homeport-kind": speaker.kind,
      "x-homeport-agent": headerSafe(from.agent),
    }
    if (parent !== null) headers["x-parent-session-id"] = parent
    return { ticket, headers }
  }

  /** Send one request; whatever goes wrong here, the request itself goes out as OpenCode made it. */
  async carry(
    ticket: string,
    url: string,
    init: RequestInit,
    send: (url: string, init: RequestInit) => Promise<Response>,
  ): Promise<Response> {
    const speaker = this.#speakers.get(ticket)
    if (!speaker) return send(url, init)
    let out = init
    try {
      const local = this.#outgoing(speaker, url, init)
      if (local instanceof Response) return local
      out = local
    } catch (error) {
      this.#failed("could not prepare a request", error)
    }
    const response = await send(url, out)
    try {
      return this.#incoming(speaker, response)
    } catch (error) {
      this.#failed("could not read an answer", error)
      return response
    }
  }

  /** OpenCode counted the tokens of an answer. */
  finished(session: string, step: string, tokens: StepTokens, costUsd: number): void {
    // the same step may be told again when its part is updated
    if (this.#finished.get(session) === step) return
    put(this.#finished, session, step, KEPT)
    const underway = this.#underway.get(session)
    this.#underway.delete(session)
    if (!underway) return this.#blind()
    if (!underway.prepared) return
    const state = this.store.open(session, this.now())
    const { prepared, speaker } = underway
    enter(state.books, tokens, costUsd, speaker.price, underway.reported)
    const lane = state.lanes[prepared.lane]
    const lost = underway.reported ? lostTokens(lane?.promptTokens ?? null, tokens) : 0
    if (lost > 0) {
      const at = new Date(this.now()).toISOString()
      const reason = reasonOf(prepared.reason, underway, state.backend)
      this.#show(enterBreak(state.books, at, reason, prepared.place, lost, speaker.price))
    }
    if (lane) lane.promptTokens = promptTokens(tokens)
    const heard = state.heard[modelOf(speaker)]
    if (heard) heard.atMs = this.now() // what is kept is kept from the end of the answer on
    this.store.save(state, this.now())
  }

  /**
   * Until when OpenCode's prunes go out, for a request whose history has tool results pruned at these moments; results
   * pruned later are still to be sent in full. Letting them through breaks the prefix: whatever else is held goes too.
   */
  prunedUntilMs(session: string, model: string, prunedAtMs: number[]): number {
    const state = this.store.open(session, this.now())
    if (prunedAtMs.some((at) => at > state.prunedUntilMs) && this.#letsPrunesThrough(state, model)) {
      state.prunedUntilMs = this.now()
      this.#release.add(session)
    }
    return state.prunedUntilMs
  }

  #letsPrunesThrough(state: SessionState, model: string): boolean {
    if (this.options.prune === "off" || this.#release.has(state.session)) return true
    const full = Object.values(state.lanes).some((lane) => (lane.promptTokens ?? 0) > FULL_SHARE * (state.contextTokens ?? Infinity))
    return full || !holds(state.heard[model], this.now(), this.options.assumeWarmS)
  }

  report(session: string): string {
    const state = this.store.open(session, this.now())
    this.store.save(state, this.now())
    const summary = summarise(this.store.family(state.root), this.now())
    return summary ? render(summary) : "Homeport: nothing was sent in this session yet."
  }

  #outgoing(speaker: Speaker, url: string, init: RequestInit): RequestInit | Response {
    const own = ownHeader(url)
    if (own) (init.headers as Headers).set(own, speaker.session)
    const api = apiOf(url)
    if (!api || typeof init.body !== "string") return init
    const body = JSON.parse(init.body) as JsonObject
    if (speaker.kind === "side") return this.#aside(speaker, init)
    const words = this.options.command && body["stream"] === true ? asked(api, body) : undefined
    if (words !== undefined) return this.#answerHere(speaker, api, body, words)
    withoutReports(api, body)
    const state = this.#stateOf(speaker)
    const before = { warmth: warmth(state.heard[modelOf(speaker)], this.now()), backend: state.backend }
    const release = this.#release.delete(speaker.session)
    const prepared = prepare(state, speaker, api, body, this.options, this.now(), release)
    this.#setCacheKey(speaker, url, body)
    put(this.#underway, speaker.session, { prepared, speaker, before, reported: false }, KEPT)
    if (prepared.newlyLate.length > 0)
      this.tell(
        `${prepared.newlyLate.length} late tools are held back until a moment when they cost nothing: ${prepared.newlyLate.join(", ")}. "/homeport take" takes them now.`,
        "info",
      )
    return { ...init, body: JSON.stringify(body) }
  }

  #aside(speaker: Speaker, init: RequestInit): RequestInit {
    this.#stateOf(speaker).books.sideRequests += 1
    return init
  }

  #answerHere(speaker: Speaker, api: Api, body: JsonObject, words: string): Response {
    const before = { warmth: "unknown" as const, backend: null }
    put(this.#underway, speaker.session, { prepared: null, speaker, before, reported: false }, KEPT)
    if (words === "take") this.#release.add(speaker.session)
    const taken = words === "take" ? "\nWhat is held goes out with the next request." : ""
    return answer(api, String(body["model"] ?? ""), this.report(speaker.session) + taken)
  }

  #incoming(speaker: Speaker, response: Response): Response {
    if (speaker.kind === "side" || !response.ok) return response
    const state = this.store.open(speaker.session, this.now())
    const model = modelOf(speaker)
    state.heard[model] = hear(response.headers.get("x-homeport-cache"), state.heard[model], this.now())
    state.backend = response.headers.get("x-homeport-backend")
    this.store.save(state, this.now())
    const underway = this.#underway.get(speaker.session)
    return watchUsage(response, () => {
      if (underway) underway.reported = true
    })
  }

  #stateOf(speaker: Speaker): SessionState {
    const state = this.store.open(speaker.session, this.now())
    state.parent = speaker.parent
    state.root = speaker.root
    if (speaker.kind !== "side") {
      state.agent = speaker.agent
      state.model = modelOf(speaker)
      state.contextTokens = speaker.contextTokens
    }
    return state
  }

  /** Sub-agents share their parent's key: their prompts begin alike. A key somebody chose is kept. */
  #setCacheKey(speaker: Speaker, url: string, body: JsonObject): void {
    if (!wantsCacheKey(url, speaker.providerID, this.options.promptCacheKey)) return
    const key = body["prompt_cache_key"]
    if (key === undefined || key === speaker.session) body["prompt_cache_key"] = speaker.root
  }

  #show(entry: Break): void {
    const { toastTokens } = this.options
    if (toastTokens > 0 && entry.lostTokens >= toastTokens) this.tell(breakMessage(entry), "warning")
  }

  /** An answer came that we did not see go out: say once that this provider goes another way. */
  #blind(): void {
    if (this.#blindTold) return
    this.#blindTold = true
    this.tell("Homeport does not see this provider's requests: only its session headers are sent.", "warning")
  }

  #failed(what: string, error: unknown): void {
    this.tell(`Homeport ${what}; it was passed on unchanged: ${error instanceof Error ? error.message : String(error)}`, "warning")
  }
}

/** When the prompt itself did not change, the route or the cache did. */
function reasonOf(reason: Reason, underway: Underway, backend: string | null): Reason {
  if (reason !== "none" && reason !== "cold_start") return reason
  if (underway.before.backend !== null && backend !== null && backend !== underway.before.backend) return "routed_elsewhere"
  return underway.before.warmth === "cold" ? "expired" : "evicted"
}

function headerSafe(name: string): string {
  return name.replace(/[^\x21-\x7e]/g, "_").slice(0, 64)
}
