import assert from "node:assert/strict"
import { test } from "node:test"
import { modelOf, prepare, type Sender } from "../src/keeper.js"
import { readOptions } from "../src/options.js"
import { systemOf, textOf, toolName, toolsOf, userTurnsOf, type Api, type JsonObject } from "../src/prompt.js"
import { Store, type SessionState } from "../src/store.js"
import { hear } from "../src/warmth.js"
import { answer, asked, commandTemplate, withoutReports } from "../src/reply.js"
import { folder } from "./folder.js"

const { options } = readOptions(undefined)
const sender: Sender = { session: "ses_1", parent: null, root: "ses_1", agent: "build", providerID: "lab", modelID: "m", kind: "main" }
const MODEL = modelOf(sender)
const START_MS = Date.UTC(2026, 0, 1)

function state(): SessionState {
  return new Store(folder(), 10).open("ses_1", START_MS)
}

function environment(folder: string, date: string): string {
  return [
    "You are powered by the model named m. The exact model ID is lab/m",
    "Here is some useful information about the environment you are running in:",
    "<env>",
    `  Working directory: ${folder}`,
    "  Platform: linux",
    `  Today's date: ${date}`,
    "</env>",
  ].join("\n")
}

const system = (folder: string, date: string): string => `You are an agent.\n\n${environment(folder, date)}\nSkills follow.`
const tool = (name: string): JsonObject => ({ type: "function", function: { name, parameters: { type: "object" } } })

interface Shape {
  folder?: string
  date?: string
  turns?: string[]
  tools?: string[]
  instructions?: string
}

/** The same conversation in each API's words: turns alternate user and assistant. */
function body(api: Api, shape: Shape): JsonObject {
  const text = system(shape.folder ?? "/a", shape.date ?? "Thu Jan 01 2026") + (shape.instructions ?? "")
  const turns = (shape.turns ?? ["do it"]).map((turn, n): JsonObject => {
    if (n % 2) return { role: "assistant", content: turn }
    if (api === "chat") return { role: "user", content: turn }
    return { role: "user", content: [{ type: api === "responses" ? "input_text" : "text", text: turn }] }
  })
  const tools = (shape.tools ?? ["bash", "read"]).map(tool)
  if (api === "chat") return { model: "m", stream: true, messages: [{ role: "system", content: text }, ...turns], tools }
  if (api === "responses") return { model: "m", stream: true, input: [{ role: "developer", content: text }, ...turns], tools }
  return { model: "m", stream: true, system: [{ type: "text", text, cache_control: { type: "ephemeral" } }], messages: turns, tools }
}

const whole = (api: Api, sent: JsonObject): string =>
  JSON.stringify([systemOf(api, sent).map((place) => place.read()), toolsOf(sent), userTurnsOf(api, sent).map(textOf)])

function send(at: SessionState, api: Api, shape: Shape, nowMs = START_MS, cache: string | null = "warm; keep=240"): JsonObject {
  const sent = body(api, shape)
  prepare(at, sender, api, sent, options, nowMs)
  at.heard[MODEL] = hear(cache, at.heard[MODEL], nowMs)
  return sent
}

const stable = (api: Api, sent: JsonObject): string => JSON.stringify([systemOf(api, sent).map((place) => place.read()), toolsOf(sent)])

for (const api of ["chat", "responses", "messages"] as const) {
  test(`${api}: system and tools are the same in another project and on another day`, () => {
    const here = send(state(), api, { folder: "/a" })
    const there = send(state(), api, { folder: "/b", date: "Fri Jan 02 2026" })
    assert.equal(stable(api, here), stable(api, there))
    assert.match(textOf(userTurnsOf(api, here)[0] as JsonObject), /^do it\n\n<system-reminder>[\s\S]*Working directory: \/a/)
  })

  test(`${api}: midnight changes nothing that was sent; the new date follows with the next turn and stays there`, () => {
    const at = state()
    const before = send(at, api, {})
    const midTurn = send(at, api, { date: "Fri Jan 02 2026", turns: ["do it", "done"] }, START_MS + 60_000)
    assert.equal(textOf(userTurnsOf(api, midTurn)[0] as JsonObject), textOf(userTurnsOf(api, before)[0] as JsonObject))
    assert.doesNotMatch(whole(api, midTurn), /Jan 02/)
    const next = send(at, api, { date: "Fri Jan 02 2026", turns: ["do it", "done", "more"] }, START_MS + 70_000)
    assert.match(textOf(userTurnsOf(api, next)[1] as JsonObject), /^more\n\n<system-reminder>\nToday's date is now: Fri Jan 02 2026/)
    const later = send(at, api, { date: "Fri Jan 02 2026", turns: ["do it", "done", "more", "ok", "again"] }, START_MS + 80_000)
    assert.equal(textOf(userTurnsOf(api, later)[1] as JsonObject), textOf(userTurnsOf(api, next)[1] as JsonObject))
    assert.equal(textOf(userTurnsOf(api, later)[2] as JsonObject), "again")
  })

  test(`${api}: the date rolls in place once the proxy's word is that the prefix is gone`, () => {
    const at = state()
    send(at, api, {})
    const next = send(at, api, { date: "Fri Jan 02 2026", turns: ["do it", "done", "more"] }, START_MS + 241_000)
    assert.match(textOf(userTurnsOf(api, next)[0] as JsonObject), /Today's date: Fri Jan 02 2026/)
    assert.equal(textOf(userTurnsOf(api, next)[1] as JsonObject), "more")
  })

  test(`${api}: a day later without any word of the cache, the frozen block stays`, () => {
    const at = state()
    const before = send(at, api, {}, START_MS, null)
    const next = send(at, api, { date: "Fri Jan 02 2026", turns: ["do it", "done", "more"] }, START_MS + 86_400_000, null)
    assert.equal(textOf(userTurnsOf(api, next)[0] as JsonObject), textOf(userTurnsOf(api, before)[0] as JsonObject))
  })

  test(`${api}: late tools wait, gone tools stay, with the system text they brought`, () => {
    const at = state()
    const before = send(at, api, { tools: ["bash", "docs_find", "read"], instructions: " docs: ask first" })
    const gone = send(at, api, { tools: ["bash", "read"] }, START_MS + 1_000)
    assert.equal(stable(api, gone), stable(api, before))
    assert.deepEqual(at.held.gone, ["docs_find"])
    const late = send(at, api, { tools: ["bash", "docs_find", "read", "web_go"] }, START_MS + 2_000)
    assert.equal(stable(api, late), stable(api, before))
    assert.deepEqual(at.held.late, ["web_go"])
    const cold = send(at, api, { tools: ["bash", "web_go"] }, START_MS + 300_000)
    assert.deepEqual(toolsOf(cold).map(toolName), ["bash", "web_go"])
  })

  test(`${api}: a compaction lets everything held go at once`, () => {
    const at = state()
    send(at, api, { turns: ["do it", "done", "more"] })
    const sent = send(at, api, { turns: ["What did we do so far?", "a summary"], tools: ["bash", "read", "new"], date: "Fri Jan 02 2026" }, START_MS + 1_000)
    assert.deepEqual(toolsOf(sent).map(toolName), ["bash", "read", "new"])
    assert.match(textOf(userTurnsOf(api, sent)[0] as JsonObject), /Fri Jan 02/)
    const second = send(at, api, { turns: ["What did we do so far?", "another summary"], date: "Sat Jan 03 2026" }, START_MS + 2_000)
    assert.match(textOf(userTurnsOf(api, second)[0] as JsonObject), /Sat Jan 03/)
  })

  test(`${api}: /homeport is answered here and leaves no trace in later prompts`, async () => {
    const command = commandTemplate().replace("$ARGUMENTS", "take")
    assert.equal(asked(api, body(api, { turns: ["do it", "done", command] })), "take")
    assert.equal(asked(api, body(api, { turns: ["do it"] })), undefined)
    const later = body(api, { turns: ["do it", "done", command, "report", "more"] })
    withoutReports(api, later)
    assert.deepEqual(userTurnsOf(api, later).map(textOf), ["do it", "more"])
    const text = await answer(api, "m", "cached 90 %").text()
    assert.match(text, /cached 90 %/)
    assert.match(text, /data: (\[DONE\]|.*(response\.completed|message_stop))/)
  })
}

test("a block that is not OpenCode's is left alone", () => {
  for (const text of ["<env>\n  Working directory: /a\n</env>", "Here is some useful information about the environment you are running in:\nnone", ""]) {
    const sent: JsonObject = { model: "m", messages: [{ role: "system", content: text }, { role: "user", content: "x" }], tools: [tool("bash")] }
    const copy = structuredClone(sent)
    prepare(state(), sender, "chat", sent, options, START_MS)
    assert.deepEqual(sent, copy)
  }
})

test("at the end of the system prompt, where asked", () => {
  const sent = body("chat", {})
  prepare(state(), sender, "chat", sent, { ...options, environment: "system-end" }, START_MS)
  assert.match(systemOf("chat", sent)[0]?.read() ?? "", /Skills follow\.\n\nYou are powered by[\s\S]*<\/env>$/)
  assert.equal(textOf(userTurnsOf("chat", sent)[0] as JsonObject), "do it")
})

test("a compaction is known as one without an environment block too", () => {
  const at = state()
  const off = { ...options, environment: "off" as const }
  at.heard[MODEL] = hear("warm; keep=3600", undefined, START_MS)
  prepare(at, sender, "chat", body("chat", { turns: ["do it", "done", "more"] }), off, START_MS)
  const sent = body("chat", { turns: ["What did we do so far?", "a summary"], tools: ["bash"] })
  prepare(at, sender, "chat", sent, off, START_MS)
  assert.deepEqual(toolsOf(sent).map(toolName), ["bash"])
})

test("what an answer found cold is warm from then on: nothing held goes with the next request", () => {
  const at = state()
  const before = send(at, "chat", {}, START_MS, "cold")
  const next = send(at, "chat", { tools: ["bash", "read", "new"], date: "Fri Jan 02 2026", turns: ["do it", "done", "more"] }, START_MS + 200_000, "cold")
  assert.equal(stable("chat", next), stable("chat", before))
  const later = send(at, "chat", { tools: ["bash", "read", "new"] }, START_MS + 500_000, "cold")
  assert.deepEqual(toolsOf(later).map(toolName), ["bash", "read", "new"])
})

test("a request that was never answered binds nothing", () => {
  const at = state()
  prepare(at, sender, "chat", body("chat", {}), options, START_MS)
  const sent = body("chat", { tools: ["bash"], date: "Fri Jan 02 2026" })
  prepare(at, sender, "chat", sent, options, START_MS + 1_000)
  assert.deepEqual(toolsOf(sent).map(toolName), ["bash"])
  assert.match(textOf(userTurnsOf("chat", sent)[0] as JsonObject), /Fri Jan 02/)
})

test("another model begins with what there is; the model before still holds what it was sent", () => {
  const at = state()
  const before = send(at, "chat", {})
  const other = body("chat", { tools: ["bash", "new"], date: "Fri Jan 02 2026" })
  prepare(at, { ...sender, modelID: "n" }, "chat", other, options, START_MS + 1_000)
  assert.deepEqual(toolsOf(other).map(toolName), ["bash", "new"])
  assert.match(textOf(userTurnsOf("chat", other)[0] as JsonObject), /Fri Jan 02/)
  assert.equal(stable("chat", send(at, "chat", { tools: ["bash", "new"] }, START_MS + 2_000)), stable("chat", before))
})

test("an agent of the same session with other tools has a list of its own", () => {
  const at = state()
  send(at, "chat", {})
  const plan = body("chat", { tools: ["read"] })
  prepare(at, { ...sender, agent: "plan" }, "chat", plan, options, START_MS)
  assert.deepEqual(toolsOf(plan).map(toolName), ["read"])
  assert.deepEqual(toolsOf(send(at, "chat", {}, START_MS + 1)).map(toolName), ["bash", "read"])
})

test("the same tools in another order go out in the order sent first", () => {
  const at = state()
  send(at, "chat", { tools: ["bash", "read"] })
  assert.deepEqual(toolsOf(send(at, "chat", { tools: ["read", "bash"] })).map(toolName), ["bash", "read"])
})

test("reasons name what parted the prompts", () => {
  const cases: [Shape, Shape, string][] = [
    [{}, { turns: ["do it", "done", "more"] }, "none"],
    [{}, { instructions: " new" }, "system_changed"],
    [{ turns: ["do it", "done", "more"] }, { turns: ["do it", "other", "more"] }, "history_edited"],
    [{ turns: ["do it", "done", "more"] }, { turns: ["do it", "done"] }, "history_truncated"],
    [{}, { tools: ["bash"] }, "tools_removed"],
    [{}, { tools: ["bash", "read", "write"] }, "tools_added"],
    [{}, { tools: ["read", "bash"] }, "tools_reordered"],
  ]
  for (const [before, after, reason] of cases) {
    const at = state()
    const open = { ...options, tools: "off" as const }
    prepare(at, sender, "chat", body("chat", before), open, START_MS)
    assert.equal(prepare(at, sender, "chat", body("chat", after), open, START_MS).reason, reason)
  }
})
