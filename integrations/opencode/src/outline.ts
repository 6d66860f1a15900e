/** What two requests of one session have in common: digests per part, and the first thing that differs, by name. */

import { createHash } from "node:crypto"
import { messagesOf, systemOf, textOf, toolName, toolsOf, type Api, type JsonObject } from "./prompt.js"

/** A prompt as digests, small enough to keep: nothing of its text can be read back. */
export interface Outline {
  model: string
  system: string
  tools: { name: string; digest: string }[]
  messages: string[]
}

/** Reasons as `homeport explain` names them; `none` is an append-only continuation. */
export type Reason =
  | "none"
  | "cold_start"
  | "model_changed"
  | "tools_reordered"
  | "tools_added"
  | "tools_removed"
  | "tool_schema_changed"
  | "system_changed"
  | "history_truncated"
  | "history_edited"
  | "routed_elsewhere"
  | "expired"
  | "evicted"

export function digest(text: string): string {
  return createHash("sha256").update(text).digest("base64url").slice(0, 12)
}

// no template renders these: a change of them is no change of the prompt
const UNSEEN = new Set(["cache_control", "id", "call_id", "tool_call_id", "tool_use_id", "status"])
const seen = (key: string, value: unknown): unknown => (UNSEEN.has(key) ? undefined : value)

export function outline(api: Api, body: JsonObject): Outline {
  const spoken = messagesOf(api, body).filter((message) => !["system", "developer"].includes(String(message["role"])))
  return {
    model: String(body["model"] ?? ""),
    system: digest(
      systemOf(api, body)
        .map((place) => place.read())
        .join("\n"),
    ),
    tools: toolsOf(body).map((tool) => ({ name: toolName(tool), digest: digest(JSON.stringify(tool, seen)) })),
    messages: spoken.map((message) => digest(typeof message["content"] === "string" && !message["tool_calls"] ? `${message["role"]}\n${textOf(message)}` : JSON.stringify(message, seen))),
  }
}

/** Where `now` first parts from `before`, in the order a template renders: model, system and tools, then messages. */
export function firstDifference(before: Outline | undefined, now: Outline): { reason: Reason; at: string } {
  if (!before) return { reason: "cold_start", at: "" }
  if (before.model !== now.model) return { reason: "model_changed", at: "/model" }
  if (before.system !== now.system) return { reason: "system_changed", at: "/system" }
  const tools = toolDifference(before.tools, now.tools)
  if (tools) return tools
  const index = before.messages.findIndex((message, n) => now.messages[n] !== message)
  if (index < 0) return { reason: "none", at: "" }
  const reason = now.messages.length < before.messages.length ? "history_truncated" : "history_edited"
  return { reason, at: `/messages/${index}` }
}

function toolDifference(before: Outline["tools"], now: Outline["tools"]): { reason: Reason; at: string } | undefined {
  const index = before.findIndex((tool, n) => now[n]?.name !== tool.name || now[n]?.digest !== tool.digest)
  const at = `/tools/${index < 0 ? before.length : index}`
  if (index < 0 && now.length === before.length) return undefined
  const old = new Set(before.map((tool) => tool.name))
  const names = new Set(now.map((tool) => tool.name))
  if (now.some((tool) => !old.has(tool.name))) return { reason: "tools_added", at }
  if (before.some((tool) => !names.has(tool.name))) return { reason: "tools_removed", at }
  return { reason: before[index]?.name === now[index]?.name ? "tool_schema_changed" : "tools_reordered", at }
}
