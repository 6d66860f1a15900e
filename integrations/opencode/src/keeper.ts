/** Decides what a request of a session looks like on the wire, so that it continues what the engine has cached. */

import { changeNote, placeEnvironment, pointerFor, takeEnvironment } from "./environment.js"
import type { Options } from "./options.js"
import { digest, firstDifference, outline, type Reason } from "./outline.js"
import { appendText, messagesOf, systemOf, textOf, toolsOf, userTurnsOf, type Api, type JsonObject } from "./prompt.js"
import type { Frozen, Head, Lane, SessionState } from "./store.js"
import { isHolding, steady } from "./tools.js"
import { holds, isGone } from "./warmth.js"

/** Who sends a request, as OpenCode's hooks tell it. */
export interface Sender {
  session: string
  parent: string | null
  root: string
  agent: string
  providerID: string
  modelID: string
  kind: "main" | "side" | "subagent"
}

export interface Prepared {
  /** Agent and model: requests of one lane share tools and system text. */
  lane: string
  /** How this request differs from the lane's last one, as sent. */
  reason: Reason
  place: string
  /** Names of late tools that are held back for the first time. */
  newlyLate: string[]
}

/** Edit `body` in place. `release` lets everything held go now: asked for, or the prefix is broken anyway. */
export function prepare(
  state: SessionState,
  sender: Sender,
  api: Api,
  body: JsonObject,
  options: Options,
  nowMs: number,
  release = false,
): Prepared {
  const model = modelOf(sender)
  const lane = `${sender.agent}@${model}`
  const offeredTools = toolsOf(body)
  const head = headOf(api, body)
  const anew = beginsAnew(state.heads[model], head)
  state.heads[model] = [head[0], head[1] ?? (anew ? null : (state.heads[model]?.[1] ?? null))]
  const heard = state.heard[model]
  const hold = !release && !anew && holds(heard, nowMs, options.assumeWarmS)
  const cold = release || anew || isGone(heard, nowMs)
  if (options.environment !== "off") keepEnvironment(state, model, api, body, options.environment, cold)
  const known = state.lanes[lane]
  const newlyLate = options.tools === "hold" ? keepTools(state, known, hold, api, body, offeredTools) : []
  const now = outline(api, body)
  const { reason, at } = firstDifference(known?.outline, now)
  state.lanes[lane] = {
    tools: toolsOf(body),
    system: systemOf(api, body).map((place) => place.read()),
    outline: now,
    promptTokens: known?.promptTokens ?? null,
  }
  return { lane, reason, place: at, newlyLate }
}

/** A model by the name under which a session keeps what belongs to it alone. */
export function modelOf(sender: Pick<Sender, "providerID" | "modelID">): string {
  return `${sender.providerID}/${sender.modelID}`
}

function headOf(api: Api, body: JsonObject): Head {
  const spoken = messagesOf(api, body).filter((message) => message["role"] !== "system" && message["role"] !== "developer")
  const [first, second] = spoken
  // an answer's text may be empty beside its tool calls, so its calls count too
  const answer = second ? digest(`${textOf(second)}${JSON.stringify(second["tool_calls"] ?? "")}`) : null
  return [digest(first ? textOf(first) : ""), answer]
}

/** True when the history is not the one that was known: a compaction, or a first message that was rewritten. */
function beginsAnew(known: Head | undefined, now: Head): boolean {
  if (!known) return false
  return known[0] !== now[0] || (known[1] !== null && now[1] !== null && known[1] !== now[1])
}

function keepEnvironment(
  state: SessionState,
  model: string,
  api: Api,
  body: JsonObject,
  where: "first-message" | "system-end",
  cold: boolean,
): void {
  const found = takeEnvironment(api, body, pointerFor(where))
  if (found === undefined) return
  const kept = state.frozen[model]
  const frozen = kept && !cold ? kept : { environment: found, told: found, notes: [] }
  state.frozen[model] = frozen
  if (!placeEnvironment(api, body, frozen.environment, where)) throw new Error("no place for the environment block")
  if (found !== frozen.told) tellChange(frozen, api, body, found)
  const turns = userTurnsOf(api, body)
  for (const note of frozen.notes) {
    const turn = turns[note.turn]
    if (turn) appendText(turn, note.text)
  }
}

/** A new day (or folder) is told behind a new user turn, once; in the middle of a turn it waits. */
function tellChange(frozen: Frozen, api: Api, body: JsonObject, found: string): void {
  const turns = userTurnsOf(api, body)
  const last = turns.at(-1)
  if (!last || turns.length < 2 || messagesOf(api, body).at(-1) !== last) return
  frozen.notes.push({ turn: turns.length - 1, text: changeNote(frozen.told, found) })
  frozen.told = found
}

function keepTools(
  state: SessionState,
  known: Lane | undefined,
  hold: boolean,
  api: Api,
  body: JsonObject,
  offered: JsonObject[],
): string[] {
  const before = new Set(state.held.late)
  state.held = { late: [], gone: [], changed: [] }
  if (!known || !hold || known.tools.length === 0) return []
  const now = steady(known.tools, offered)
  body["tools"] = now.tools
  if (!isHolding(now)) return [] // the same tools: at most their order differed, and the order sent first stays
  // a server that comes or goes brings its instructions into the system prompt or takes them away: both stay together
  const places = systemOf(api, body)
  if (places.length === known.system.length) places.forEach((place, n) => place.write(known.system[n] ?? place.read()))
  state.held = { late: now.late, gone: now.gone, changed: now.changed }
  return now.late.filter((name) => !before.has(name))
}
