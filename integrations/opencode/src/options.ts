/** What a user may set in opencode.json, with its defaults and its errors. */

import { homedir } from "node:os"
import { join } from "node:path"

export interface Options {
  /** Where OpenCode's environment block (model id, folders, date) goes. */
  environment: "first-message" | "system-end" | "off"
  /** Keep the tool list still while the cache is warm. */
  tools: "hold" | "off"
  /** Send pruned tool results in full until the cache is cold, then let all prunes through at once. */
  prune: "hold" | "off"
  /** Send `prompt_cache_key`: where the provider is known to want it, to the named providers, always or never. */
  promptCacheKey: "auto" | boolean | string[]
  /** A cache break of at least this many tokens is shown as a toast; 0 shows none. */
  toastTokens: number
  /** How long a prefix counts as warm when nothing between here and the engine says so, in seconds. */
  assumeWarmS: number
  /** Add the `/homeport` command. */
  command: boolean
  /** Where state and reports lie, one JSON file per session. */
  dataDir: string
  /** How many session files are kept; the oldest go first. */
  maxSessions: number
}

export function defaultDataDir(env: Record<string, string | undefined> = process.env): string {
  return env["HOMEPORT_OPENCODE_DATA"] || join(env["XDG_DATA_HOME"] || join(homedir(), ".local", "share"), "opencode-homeport")
}

type Check = (value: unknown) => string | undefined

const oneOf =
  (...words: string[]): Check =>
  (value) =>
    words.includes(value as string) ? undefined : `must be one of ${words.map((word) => `"${word}"`).join(", ")}`

const count: Check = (value) =>
  typeof value === "number" && Number.isFinite(value) && value >= 0 ? undefined : "must be a number, 0 or more"

const flag: Check = (value) => (typeof value === "boolean" ? undefined : "must be true or false")

const CHECKS: Record<keyof Options, Check> = {
  environment: oneOf("first-message", "system-end", "off"),
  tools: oneOf("hold", "off"),
  prune: oneOf("hold", "off"),
  promptCacheKey: (value) =>
    value === "auto" || typeof value === "boolean" || (Array.isArray(value) && value.every((id) => typeof id === "string"))
      ? undefined
      : 'must be "auto", true, false or a list of provider ids',
  toastTokens: count,
  assumeWarmS: count,
  command: flag,
  dataDir: (value) => (typeof value === "string" && value !== "" ? undefined : "must be a folder"),
  maxSessions: count,
}

/** The options as given over the defaults. A wrong one keeps its default and is named in `errors`. */
export function readOptions(given: unknown): { options: Options; errors: string[] } {
  const options: Options = {
    environment: "first-message",
    tools: "hold",
    prune: "hold",
    promptCacheKey: "auto",
    toastTokens: 8_000,
    assumeWarmS: 3_600,
    command: true,
    dataDir: defaultDataDir(),
    maxSessions: 500,
  }
  if (given === undefined || given === null) return { options, errors: [] }
  if (typeof given !== "object" || Array.isArray(given)) return { options, errors: ["the options must be an object"] }
  const errors: string[] = []
  for (const [name, value] of Object.entries(given)) {
    const check = Object.hasOwn(CHECKS, name) ? CHECKS[name as keyof Options] : undefined
    const wrong = check ? check(value) : `is not an option; known are ${Object.keys(CHECKS).join(", ")}`
    if (wrong) errors.push(`${name} ${wrong}`)
    else Object.assign(options, { [name]: value })
  }
  return { options, errors }
}
