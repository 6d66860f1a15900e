/** OpenCode's environment block: recognised for certain, taken out of the system prompt, put where it breaks nothing. */

import { appendText, systemOf, userTurnsOf, type Api, type JsonObject } from "./prompt.js"

/**
 * The block as OpenCode writes it: an optional model line, one sentence, `<env>` with the folders and the date.
 * Anything that differs from this shape is left alone.
 */
const BLOCK =
  /(?:^|\n)((?:You are powered by the model named [^\n]*\n)?Here is some useful information about the environment you are running in:\n<env>\n(?: {2}[^\n]*\n)*? {2}Working directory: [^\n]*\n(?: {2}[^\n]*\n)*<\/env>)(?=\n|$)/

const DATE = /^ {2}Today's date: (.+)$/m

/** Stands where the block stood: one line that never changes. */
export const POINTER = "The environment you are running in is described in the <env> block of the first user message."
const POINTER_AT_END = "The environment you are running in is described in the <env> block at the end of these instructions."

/** Take the block out of the system prompt and return it; undefined when there is none. */
export function takeEnvironment(api: Api, body: JsonObject, pointer = POINTER): string | undefined {
  for (const place of systemOf(api, body)) {
    const text = place.read()
    const found = BLOCK.exec(text)
    if (!found?.[1]) continue
    const start = found.index + found[0].length - found[1].length
    place.write(text.slice(0, start) + pointer + text.slice(start + found[1].length))
    return found[1]
  }
  return undefined
}

/** What tells the model of a new day, or of any other change, without touching what it has read. */
export function changeNote(told: string, now: string): string {
  const date = DATE.exec(now)?.[1]
  const onlyDate = date !== undefined && told.replace(DATE, "") === now.replace(DATE, "")
  return reminder(onlyDate ? `Today's date is now: ${date}` : `The environment has changed. It is now:\n${now}`)
}

/** Put the block behind the first user message, or, where asked, at the end of the system prompt. */
export function placeEnvironment(api: Api, body: JsonObject, environment: string, where: "first-message" | "system-end"): boolean {
  if (where === "first-message") {
    const first = userTurnsOf(api, body)[0]
    if (!first) return false
    appendText(first, reminder(environment))
    return true
  }
  const last = systemOf(api, body).at(-1)
  last?.write(`${last.read()}\n\n${environment}`)
  return last !== undefined
}

export function pointerFor(where: "first-message" | "system-end"): string {
  return where === "first-message" ? POINTER : POINTER_AT_END
}

function reminder(text: string): string {
  return `<system-reminder>\n${text}\n</system-reminder>`
}
