#!/usr/bin/env node
/** `opencode-homeport check | report`: whether the plugin is loaded, and its books for people and scripts. */

import { parseArgs } from "node:util"
import { check } from "./check.js"
import { defaultDataDir } from "./options.js"
import { render, summarise } from "./report.js"
import { Store } from "./store.js"

const USAGE = `usage: opencode-homeport check
       opencode-homeport report [--session ID] [--all] [--json] [--data DIR]

check   start OpenCode once in this folder and say whether it loaded the plugin, and if not, why
report  cached tokens, savings and breaks of the latest session (with its sub-agents), of one, or of all`

async function main(argv: string[]): Promise<number> {
  const { values, positionals } = parseArgs({
    args: argv,
    allowPositionals: true,
    options: {
      session: { type: "string" },
      all: { type: "boolean", default: false },
      json: { type: "boolean", default: false },
      data: { type: "string", default: defaultDataDir() },
      help: { type: "boolean", short: "h", default: false },
    },
  })
  if (values.help) return say(USAGE)
  if (positionals[0] === "check" && positionals.length === 1) {
    const verdict = await check(process.cwd())
    return verdict.ok ? say(verdict.message) : fail(verdict.message)
  }
  if (positionals[0] === "report" && positionals.length === 1) return report(values)
  process.stderr.write(`${USAGE}\n`)
  return 2
}

function report(values: { session?: string | undefined; all: boolean; json: boolean; data: string }): number {
  const store = new Store(values.data, Infinity)
  const states = store.all()
  const roots = [...new Set(states.map((state) => state.root))]
  const latest = values.session ? states.find((state) => state.session === values.session)?.root : roots[0]
  const wanted = values.all ? roots : latest ? [latest] : []
  const summaries = wanted.map((root) => summarise(store.family(root), Date.now())).filter((summary) => summary !== undefined)
  if (summaries.length === 0) return fail(`no session ${values.session ?? ""} in ${values.data}`)
  if (!values.json) return say(summaries.map(render).join("\n\n"))
  return say(JSON.stringify(values.all ? summaries : summaries[0], null, 2))
}

function say(text: string): number {
  process.stdout.write(`${text}\n`)
  return 0
}

function fail(text: string): number {
  process.stderr.write(`opencode-homeport: ${text}\n`)
  return 1
}

try {
  process.exitCode = await main(process.argv.slice(2))
} catch (error) {
  // parseArgs explains a wrong option in one line
  process.exitCode = fail(error instanceof Error ? error.message : String(error)) + 1
}
