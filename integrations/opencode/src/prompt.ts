/** One view of a request body for the three APIs OpenCode speaks: system text, user turns, tools. */

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json }
export type JsonObject = { [key: string]: Json }
export type Api = "chat" | "responses" | "messages"

/** A place in the body that holds text, to read and to replace. */
export interface TextPlace {
  read(): string
  write(text: string): void
}

/** Which API a request URL speaks, or undefined for one we do not edit. */
export function apiOf(url: string): Api | undefined {
  const path = url.split(/[?#]/, 1)[0] ?? ""
  if (path.endsWith("/chat/completions")) return "chat"
  if (path.endsWith("/responses")) return "responses"
  if (path.endsWith("/messages")) return "messages"
  return undefined
}

export function isObject(value: Json | undefined): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value)
}

/** The conversation as a list, whatever the API calls it. */
export function messagesOf(api: Api, body: JsonObject): JsonObject[] {
  const list = body[api === "responses" ? "input" : "messages"]
  return Array.isArray(list) ? list.filter(isObject) : []
}

export function withMessages(api: Api, body: JsonObject, messages: JsonObject[]): void {
  body[api === "responses" ? "input" : "messages"] = messages
}

function property(owner: JsonObject, key: string): TextPlace {
  return { read: () => owner[key] as string, write: (text) => (owner[key] = text) }
}

/** Every text inside a `content` (string or parts), in order; tool results are no text of their own. */
function textsOf(owner: JsonObject, key: string): TextPlace[] {
  const content = owner[key]
  if (typeof content === "string") return [property(owner, key)]
  if (!Array.isArray(content)) return []
  return content
    .filter(isObject)
    .filter((part) => typeof part["text"] === "string")
    .map((part) => property(part, "text"))
}

const isSystem = (message: JsonObject): boolean => message["role"] === "system" || message["role"] === "developer"

/** All system text in the order the model sees it. */
export function systemOf(api: Api, body: JsonObject): TextPlace[] {
  const own = api === "chat" ? [] : textsOf(body, api === "messages" ? "system" : "instructions")
  return [...own, ...messagesOf(api, body).filter(isSystem).flatMap((message) => textsOf(message, "content"))]
}

/** What a person (or a parent agent) said: user messages with text, without those that only carry tool results. */
export function userTurnsOf(api: Api, body: JsonObject): JsonObject[] {
  return messagesOf(api, body).filter((message) => message["role"] === "user" && textsOf(message, "content").length > 0)
}

export function textOf(message: JsonObject): string {
  return textsOf(message, "content")
    .map((place) => place.read())
    .join("\n")
}

/** Put text behind what a user message says, inside its last text part: the number of parts and their marks stay. */
export function appendText(message: JsonObject, text: string): void {
  const last = textsOf(message, "content").at(-1)
  last?.write(`${last.read()}\n\n${text}`)
}

export function toolsOf(body: JsonObject): JsonObject[] {
  const tools = body["tools"]
  return Array.isArray(tools) ? tools.filter(isObject) : []
}

/** A tool's name in any of the three APIs; provider tools without one go by their type. */
export function toolName(tool: JsonObject): string {
  const nested = tool["function"]
  const name = (isObject(nested) ? nested["name"] : undefined) ?? tool["name"] ?? tool["type"]
  return typeof name === "string" ? name : ""
}
