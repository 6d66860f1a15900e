/** An answer made here, without an engine: how `/homeport` shows its report at no cost. */

import type { Api, Json, JsonObject } from "./prompt.js"
import { messagesOf, textOf, userTurnsOf, withMessages } from "./prompt.js"

/** What the command puts into the conversation; a person never types it. */
export const MARK = "<homeport-report>"
const END = "</homeport-report>"

export function commandTemplate(): string {
  return `${MARK}$ARGUMENTS${END}`
}

/** The words behind `/homeport` when the newest user turn is that command, else undefined. */
export function asked(api: Api, body: JsonObject): string | undefined {
  const last = userTurnsOf(api, body).at(-1)
  const text = last ? textOf(last) : ""
  const start = text.indexOf(MARK)
  if (!last || start < 0 || messagesOf(api, body).at(-1) !== last) return undefined
  return text.slice(start + MARK.length, text.indexOf(END, start)).trim()
}

/** Leave earlier reports out of the conversation: the engine never saw them, so it need not read them later. */
export function withoutReports(api: Api, body: JsonObject): void {
  const messages = messagesOf(api, body)
  let inside = false
  const kept = messages.filter((message) => {
    if (message["role"] === "user") inside = textOf(message).includes(MARK)
    return !inside
  })
  if (kept.length < messages.length) withMessages(api, body, kept)
}

/** A streamed answer with `text` in the words of the API. */
export function answer(api: Api, model: string, text: string): Response {
  const frames = { chat, responses, messages }[api](model, text)
  const lines = frames.map(({ event, data }) => {
    const payload = typeof data === "string" ? data : JSON.stringify(data)
    return `${event ? `event: ${event}\n` : ""}data: ${payload}\n\n`
  })
  return new Response(lines.join(""), { status: 200, headers: { "content-type": "text/event-stream" } })
}

interface Frame {
  event?: string
  data: Json
}

const seconds = (): number => Math.floor(Date.now() / 1_000)

function chat(model: string, text: string): Frame[] {
  const base: JsonObject = { id: "chatcmpl-homeport", object: "chat.completion.chunk", created: seconds(), model }
  const choice = (delta: JsonObject, finish: string | null): JsonObject => ({ ...base, choices: [{ index: 0, delta, finish_reason: finish }] })
  const usage = { prompt_tokens: 0, completion_tokens: 0, total_tokens: 0 }
  return [
    { data: choice({ role: "assistant", content: text }, null) },
    { data: choice({}, "stop") },
    { data: { ...base, choices: [], usage } },
    { data: "[DONE]" },
  ]
}

function responses(model: string, text: string): Frame[] {
  const base: JsonObject = { id: "resp_homeport", object: "response", created_at: seconds(), model, tools: [] }
  const item: JsonObject = {
    type: "message",
    id: "msg_homeport",
    role: "assistant",
    status: "completed",
    content: [{ type: "output_text", text, annotations: [] }],
  }
  const usage = { input_tokens: 0, output_tokens: 0, total_tokens: 0 }
  const events: JsonObject[] = [
    { type: "response.created", response: { ...base, status: "in_progress", output: [] } },
    { type: "response.output_item.added", output_index: 0, item: { ...item, status: "in_progress", content: [] } },
    { type: "response.output_text.delta", item_id: "msg_homeport", output_index: 0, content_index: 0, delta: text },
    { type: "response.output_item.done", output_index: 0, item },
    { type: "response.completed", response: { ...base, status: "completed", output: [item], usage } },
  ]
  return events.map((data, n) => ({ event: String(data["type"]), data: { ...data, sequence_number: n } }))
}

function messages(model: string, text: string): Frame[] {
  const usage = { input_tokens: 0, output_tokens: 0 }
  const message: JsonObject = { id: "msg_homeport", type: "message", role: "assistant", model, content: [], usage }
  const events: JsonObject[] = [
    { type: "message_start", message: { ...message, stop_reason: null, stop_sequence: null } },
    { type: "content_block_start", index: 0, content_block: { type: "text", text: "" } },
    { type: "content_block_delta", index: 0, delta: { type: "text_delta", text } },
    { type: "content_block_stop", index: 0 },
    { type: "message_delta", delta: { stop_reason: "end_turn", stop_sequence: null }, usage },
    { type: "message_stop" },
  ]
  return events.map((data) => ({ event: String(data["type"]), data }))
}
