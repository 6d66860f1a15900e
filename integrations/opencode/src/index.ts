/** The plugin as OpenCode loads it: hooks on one side, {@link Homeport} on the other. */

import type { Hooks, Plugin, PluginModule } from "@opencode-ai/plugin"
import { mkdirSync, writeFileSync } from "node:fs"
import { join } from "node:path"
import { Homeport, type Speaker, type Tell } from "./homeport.js"
import { modelOf } from "./keeper.js"
import { readOptions, type Options } from "./options.js"
import { People } from "./people.js"
import { commandTemplate } from "./reply.js"
import { Store } from "./store.js"
import { VERSION } from "./version.js"
import { TICKET, watch } from "./wire.js"

type Client = Parameters<Plugin>[0]["client"]

let instances = 0

// named twice in the configuration (by name and by path), it works once
const KEY = Symbol.for("opencode-homeport.folders")
const folders = ((globalThis as typeof globalThis & { [KEY]?: Set<string> })[KEY] ??= new Set<string>())

const server: Plugin = async ({ client, directory }, given) => {
  if (folders.has(directory)) return {}
  folders.add(directory)
  const { options, errors } = readOptions(given)
  const tell = teller(client)
  for (const error of errors) tell(`Homeport option ${error}; the default is used`, "warning")
  const store = new Store(options.dataDir, options.maxSessions)
  const homeport = new Homeport(`${process.pid}-${++instances}`, options, store, new People(asker(client)), tell)
  const unwatch = watch(homeport.instance, (ticket, url, init, send) => homeport.carry(ticket, url, init, send))
  leaveSign(options, directory, store, tell)
  return {
    config: async (config) => {
      if (options.command)
        config.command = {
          ...config.command,
          homeport: { template: commandTemplate(), description: "prompt cache report; `take` releases what is held" },
        }
    },
    "chat.headers": async (input, output) => {
      const { ticket, headers } = await homeport.announce(speakerOf(input))
      Object.assign(output.headers, headers, { [TICKET]: ticket })
    },
    "experimental.chat.messages.transform": async (_, output) => {
      restorePruned(homeport, output.messages)
    },
    event: async ({ event }) => {
      if (event.type === "session.created" || event.type === "session.updated")
        homeport.people.learn(event.properties.info.id, event.properties.info.parentID ?? null)
      if (event.type !== "message.part.updated" || event.properties.part.type !== "step-finish") return
      const { id, sessionID, tokens, cost } = event.properties.part
      homeport.finished(sessionID, id, tokens, cost)
    },
    dispose: async () => {
      folders.delete(directory)
      unwatch()
    },
  }
}

/** The file by which anyone can see that the plugin was loaded, when and from where. */
function leaveSign(options: Options, directory: string, store: Store, tell: Tell): void {
  try {
    mkdirSync(options.dataDir, { recursive: true, mode: 0o700 })
    const sign = { version: VERSION, pid: process.pid, at: new Date().toISOString(), directory, module: import.meta.url }
    writeFileSync(join(options.dataDir, "loaded.json"), `${JSON.stringify(sign)}\n`)
    store.sweep()
  } catch (error) {
    tell(`Homeport cannot write to ${options.dataDir}: ${String(error)}. Set the option dataDir to a folder it may write to.`, "warning")
  }
}

type HeadersInput = Parameters<NonNullable<Hooks["chat.headers"]>>[0]

function speakerOf(input: HeadersInput): Omit<Speaker, "parent" | "root" | "kind"> {
  const { cost, limit } = input.model
  return {
    session: input.sessionID,
    agent: input.agent,
    providerID: input.model.providerID,
    modelID: input.model.id,
    price: { inputUsd: cost?.input || null, cachedUsd: cost?.input ? (cost.cache?.read ?? null) : null },
    contextTokens: limit?.context || null,
  }
}

type Messages = Parameters<NonNullable<Hooks["experimental.chat.messages.transform"]>>[1]["messages"]

/** Send tool results in full that OpenCode pruned while the cache is warm: what is stored stays pruned. */
function restorePruned(homeport: Homeport, messages: Messages): void {
  const session = messages[0]?.info.sessionID
  const asking = messages.map(({ info }) => info).findLast((info) => info.role === "user")
  if (session === undefined || asking?.role !== "user") return
  const pruned = messages.flatMap((message) => message.parts.map(prunedAtMs)).filter((at) => at !== undefined)
  const untilMs = homeport.prunedUntilMs(session, modelOf(asking.model), pruned)
  for (const message of messages)
    message.parts.forEach((part, n) => {
      const at = prunedAtMs(part)
      if (at === undefined || at <= untilMs || part.type !== "tool" || part.state.status !== "completed") return
      const { compacted: _, ...time } = part.state.time
      message.parts[n] = { ...part, state: { ...part.state, time } }
    })
}

function prunedAtMs(part: Messages[number]["parts"][number]): number | undefined {
  return part.type === "tool" && part.state.status === "completed" ? part.state.time.compacted : undefined
}

function asker(client: Client): (session: string) => Promise<string | null> {
  return async (session) => {
    const answer = await client.session.get({ path: { id: session } }).catch(() => undefined)
    return answer?.data?.parentID ?? null
  }
}

/** Into the log, and as a toast where there is a screen for it. */
function teller(client: Client): Tell {
  return (message, variant) => {
    const quiet = (): void => undefined
    const level = variant === "warning" ? "warn" : "info"
    client.app.log({ body: { service: "homeport", level, message } }).catch(quiet)
    client.tui.showToast({ body: { title: "Homeport", message, variant, duration: 8_000 } }).catch(quiet)
  }
}

const plugin: PluginModule = { id: "opencode-homeport", server }
export default plugin
