/** The self-test: OpenCode skips a plugin that fails to load without a word, so ask OpenCode itself and say why. */

import { spawnSync } from "node:child_process"
import { existsSync, readFileSync, statSync } from "node:fs"
import { isAbsolute, join, resolve } from "node:path"
import { fileURLToPath, pathToFileURL } from "node:url"
import { readOptions } from "./options.js"
import { VERSION } from "./version.js"

const INSTALL = '"plugin": ["opencode-homeport"]'
const PATIENCE_MS = 120_000

interface Sign {
  version: string
  at: string
  module: string
}

export interface Verdict {
  ok: boolean
  message: string
}

/** Start `opencode debug config` in `folder` and see whether the plugin left its sign. */
export async function check(folder: string, opencode = process.env["OPENCODE_BIN"] || "opencode"): Promise<Verdict> {
  const startedAt = Date.now()
  const run = spawnSync(opencode, ["debug", "config"], { cwd: folder, encoding: "utf8", timeout: PATIENCE_MS, maxBuffer: 1 << 26 })
  if (run.error) return { ok: false, message: `cannot run ${opencode}: ${run.error.message}. Put it on the PATH or set OPENCODE_BIN.` }
  const entry = entryOf(run.stdout)
  if (!entry) return { ok: false, message: `opencode.json does not name the plugin; add ${INSTALL}` }
  const { options, errors } = readOptions(entry.options)
  const sign = readSign(join(options.dataDir, "loaded.json"))
  if (sign && Date.parse(sign.at) >= startedAt - 1_000) {
    const wrong = errors.map((error) => `\noption ${error}`).join("")
    return { ok: errors.length === 0, message: `opencode-homeport ${sign.version} was loaded by OpenCode from ${sign.module}${wrong}` }
  }
  return { ok: false, message: `OpenCode did not load ${entry.spec}: ${await whyNot(entry.spec, folder)}` }
}

function entryOf(stdout: string): { spec: string; options: unknown } | undefined {
  const start = stdout.indexOf("{")
  if (start < 0) return undefined
  const config = JSON.parse(stdout.slice(start)) as { plugin?: (string | [string, unknown])[] }
  for (const item of config.plugin ?? []) {
    const [spec, options] = Array.isArray(item) ? item : [item, undefined]
    if (/homeport/.test(spec) || namesUs(spec)) return { spec, options }
  }
  return undefined
}

/** A folder may have any name: its package says who it is. */
function namesUs(spec: string): boolean {
  const path = join(pathOf(spec, "."), "package.json")
  return existsSync(path) && /"name"\s*:\s*"opencode-homeport"/.test(readFileSync(path, "utf8"))
}

function pathOf(spec: string, folder: string): string {
  if (spec.startsWith("file://")) return fileURLToPath(spec)
  return isAbsolute(spec) ? spec : resolve(folder, spec)
}

function readSign(path: string): Sign | undefined {
  try {
    return JSON.parse(readFileSync(path, "utf8")) as Sign
  } catch {
    return undefined
  }
}

/** Load it here, where an error is shown. */
async function whyNot(spec: string, folder: string): Promise<string> {
  const path = pathOf(spec, folder)
  if (!existsSync(path)) {
    return spec.startsWith("file://") || isAbsolute(spec)
      ? "there is no such file"
      : `it is a package that OpenCode could not install; try: npm view ${spec} version`
  }
  try {
    const entry = statSync(path).isDirectory() ? mainOf(path) : path
    if (!existsSync(entry)) return `its main file ${entry} is missing; build it with: npm ci && npm run build`
    const module = (await import(pathToFileURL(entry).href)) as { default?: { server?: unknown } }
    if (typeof module.default?.server !== "function") return "it has no default export with a server function"
    return "it loads here (version " + VERSION + "), so OpenCode's own log should tell more: opencode --print-logs debug config"
  } catch (error) {
    return error instanceof Error ? error.message : String(error)
  }
}

function mainOf(folder: string): string {
  const manifest = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as { main?: string }
  return join(folder, manifest.main ?? "index.js")
}
