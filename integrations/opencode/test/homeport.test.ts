import assert from "node:assert/strict"
import { readFileSync, writeFileSync, mkdirSync } from "node:fs"
import { join } from "node:path"
import { test } from "node:test"
import { emptyBooks, enter, lostTokens, total } from "../src/books.js"
import { Homeport } from "../src/homeport.js"
import plugin from "../src/index.js"
import { readOptions } from "../src/options.js"
import { People, kindOf } from "../src/people.js"
import { ownHeader, wantsCacheKey } from "../src/providers.js"
import { render, summarise } from "../src/report.js"
import { Store } from "../src/store.js"
import { VERSION } from "../src/version.js"
import { folder } from "./folder.js"
import { hear, holds, isGone, warmth } from "../src/warmth.js"
import { TICKET, watch, watchUsage } from "../src/wire.js"

const from = (session: string, agent = "build") => ({
  session,
  agent,
  providerID: "lab",
  modelID: "m",
  price: { inputUsd: 2, cachedUsd: 0.5 },
  contextTokens: 100_000,
})
let steps = 0
const PARENTS: Record<string, string | null> = { ses_a: null, ses_child: "ses_a", ses_grand: "ses_child" }

function rig(given: Record<string, unknown> = {}) {
  const told: string[] = []
  const { options } = readOptions({ dataDir: folder(), ...given })
  const store = new Store(options.dataDir, options.maxSessions)
  const clock = { ms: Date.UTC(2026, 0, 1) }
  const people = new People(async (session) => PARENTS[session] ?? null)
  const homeport = new Homeport("i", options, store, people, (message) => told.push(message), () => clock.ms)
  return { homeport, store, told, clock }
}

const reply = (headers: Record<string, string> = {}, cached: number | null = 0): Response =>
  new Response(cached === null ? "data: {}\n\n" : `data: {"usage":{"cached_tokens": ${cached}}}\n\n`, { headers })

async function turn(at: ReturnType<typeof rig>, session: string, content: string, read: number, input: number, headers: Record<string, string> = {}, agent = "build", tools = ["bash"]) {
  const { ticket, headers: own } = await at.homeport.announce(from(session, agent))
  const body = JSON.stringify({ model: "m", stream: true, messages: [{ role: "user", content }], tools: tools.map((name) => ({ type: "function", function: { name } })) })
  let sent = ""
  const response = await at.homeport.carry(ticket, "http://h/v1/chat/completions", { body, headers: new Headers(own) }, async (_, init) => {
    sent = String(init.body)
    return reply(headers, read)
  })
  const text = await response.text()
  at.homeport.finished(session, `prt_${++steps}`, { input, output: 5, cache: { read, write: 0 } }, 0.01)
  return { own, sent, text }
}

test("headers name the session, its parent and its kind, side requests before all", async () => {
  const at = rig()
  assert.deepEqual((await at.homeport.announce(from("ses_a"))).headers, {
    "x-session-affinity": "ses_a",
    "x-session-id": "ses_a",
    "x-homeport-kind": "main",
    "x-homeport-agent": "build",
  })
  const child = (await at.homeport.announce(from("ses_child", "general"))).headers
  assert.equal(child["x-homeport-kind"], "subagent")
  assert.equal(child["x-parent-session-id"], "ses_a")
  assert.equal((await at.homeport.announce(from("ses_child", "title"))).headers["x-homeport-kind"], "side")
  for (const agent of ["title", "summary", "compaction"]) assert.equal(kindOf(agent, null), "side")
})

test("a circle of parents ends", async () => {
  const people = new People(async (session) => (session === "x" ? "y" : "x"))
  assert.ok(["x", "y"].includes(await people.root("x")))
})

test("a costly break is told with its cause, a small one is not; unpriced stays unpriced", async () => {
  const at = rig({ toastTokens: 5_000 })
  await turn(at, "ses_a", "one", 0, 20_000)
  await turn(at, "ses_a", "two", 0, 21_000)
  const state = at.store.open("ses_a", at.clock.ms)
  assert.equal(state.books.breaks.length, 1)
  assert.equal(state.books.breaks[0]?.reason, "history_edited")
  assert.equal(state.books.lostTokens, 20_000)
  assert.equal(at.told.length, 1)
  assert.match(at.told[0] ?? "", /20,000 tokens \(\$0\.03\) were computed again: an earlier message changed/)
  await turn(at, "ses_a", "two", 20_900, 300)
  assert.equal(at.told.length, 1)
})

test("without a change in the prompt the route or the cache is to blame", async () => {
  const cases: [Record<string, string>, Record<string, string>, number, string][] = [
    [{ "x-homeport-backend": "d0" }, { "x-homeport-backend": "d1" }, 1_000, "routed_elsewhere"],
    [{ "x-homeport-cache": "warm; keep=10s" }, {}, 11_000, "expired"],
    [{ "x-homeport-cache": "warm; keep=10s" }, {}, 9_000, "evicted"],
  ]
  for (const [first, second, laterMs, reason] of cases) {
    const at = rig()
    await turn(at, "ses_a", "one", 0, 20_000, first)
    at.clock.ms += laterMs
    await turn(at, "ses_a", "one", 0, 20_000, second)
    assert.equal(at.store.open("ses_a", 0).books.breaks[0]?.reason, reason)
  }
})

test("cached tokens nobody reported are unknown, not zero, and no break", async () => {
  const at = rig()
  const { ticket } = await at.homeport.announce(from("ses_a"))
  for (let n = 0; n < 2; n++) {
    const body = JSON.stringify({ messages: [{ role: "user", content: "x" }] })
    const response = await at.homeport.carry(ticket, "http://h/v1/chat/completions", { body }, async () => reply({}, null))
    await response.text()
    at.homeport.finished("ses_a", `prt_${n}`, { input: 9_000, output: 1, cache: { read: 0, write: 0 } }, 0)
  }
  const books = at.store.open("ses_a", 0).books
  assert.equal(books.cachedTokens, null)
  assert.equal(books.breaks.length, 0)
  assert.match(at.homeport.report("ses_a"), /not reported/)
})

test("a side request goes out as it came and moves nothing", async () => {
  const at = rig()
  await turn(at, "ses_a", "one", 0, 2_000, { "x-homeport-cache": "warm; keep=60" })
  const before = structuredClone(at.store.open("ses_a", 0))
  const { ticket } = await at.homeport.announce(from("ses_a", "title"))
  const init = { body: '{"messages":[ ]}' }
  let sent: RequestInit | undefined
  await at.homeport.carry(ticket, "http://h/v1/chat/completions", init, async (_, out) => {
    sent = out
    return reply({ "x-homeport-cache": "cold", "x-homeport-backend": "other" })
  })
  const after = at.store.open("ses_a", 0)
  assert.equal(sent, init)
  assert.equal(after.books.sideRequests, 1)
  assert.deepEqual({ ...after, books: null }, { ...before, books: null })
})

test("what cannot be read goes out unchanged", async () => {
  const at = rig()
  const { ticket } = await at.homeport.announce(from("ses_a"))
  for (const body of ["{not json", "[]", "null", '{"messages":5,"tools":7}', '{"input":"just text"}']) {
    const init = { body }
    let sent: unknown
    const response = await at.homeport.carry(ticket, "http://h/v1/responses", init, async (_, out) => {
      sent = out.body
      return reply()
    })
    assert.equal(response.status, 200)
    assert.equal(typeof sent === "string" ? sent.replace(/\s/g, "") : "", body.replace(/\s/g, ""))
  }
})

const MODEL = "lab/m"

test("prunes are held while warm and go through together when cold", () => {
  const at = rig()
  const state = at.store.open("ses_a", at.clock.ms)
  state.heard[MODEL] = hear("warm; keep=60", undefined, at.clock.ms)
  const pruned = at.clock.ms + 1_000
  const isHeld = (): boolean => pruned > at.homeport.prunedUntilMs("ses_a", MODEL, [pruned])
  at.clock.ms += 2_000
  assert.equal(isHeld(), true)
  at.clock.ms += 60_000
  assert.equal(isHeld(), false)
  state.heard[MODEL] = hear("warm; keep=60", undefined, at.clock.ms)
  assert.equal(isHeld(), false, "what went through once stays through")
})

test("another model has nothing of this session: prunes go through with its first request", () => {
  const at = rig()
  const state = at.store.open("ses_a", at.clock.ms)
  state.heard[MODEL] = hear("warm; keep=60", undefined, at.clock.ms)
  at.clock.ms += 2_000
  assert.equal(at.homeport.prunedUntilMs("ses_a", "lab/other", [at.clock.ms - 1_000]), at.clock.ms)
})

for (const why of ["full", "off"] as const)
  test(`prunes that go through a warm cache (${why}) take everything held with them`, async () => {
    const at = rig(why === "off" ? { prune: "off" } : {})
    await turn(at, "ses_a", "one", 0, 90_000, { "x-homeport-cache": "warm; keep=600" }, "build", ["bash"])
    const held = await turn(at, "ses_a", "one", 90_000, 0, { "x-homeport-cache": "warm; keep=600" }, "build", ["bash", "late"])
    assert.doesNotMatch(held.sent, /late/)
    at.clock.ms += 1_000
    assert.equal(at.homeport.prunedUntilMs("ses_a", MODEL, []) < at.clock.ms, true, "nothing pruned, nothing broken")
    assert.equal(at.homeport.prunedUntilMs("ses_a", MODEL, [at.clock.ms - 1]), at.clock.ms)
    const taken = await turn(at, "ses_a", "one", 0, 90_000, { "x-homeport-cache": "warm; keep=600" }, "build", ["bash", "late"])
    assert.match(taken.sent, /late/)
  })

test("a step that is told twice counts once and is no blind spot", async () => {
  const at = rig()
  await turn(at, "ses_a", "one", 0, 2_000)
  at.homeport.finished("ses_a", `prt_${steps}`, { input: 2_000, output: 5, cache: { read: 0, write: 0 } }, 0.01)
  assert.equal(at.store.open("ses_a", 0).books.requests, 1)
  assert.deepEqual(at.told, [])
})

test("a provider whose requests are not seen is told of, once", () => {
  const at = rig()
  at.homeport.finished("ses_x", "prt_1", { input: 1, output: 1, cache: { read: 0, write: 0 } }, 0)
  at.homeport.finished("ses_x", "prt_2", { input: 1, output: 1, cache: { read: 0, write: 0 } }, 0)
  assert.equal(at.told.length, 1)
})

test("the report sums a session with its sub-agents", async () => {
  const at = rig()
  await turn(at, "ses_a", "one", 0, 2_000)
  await turn(at, "ses_child", "two", 1_500, 500, {}, "general")
  const summary = summarise(at.store.family("ses_a"), at.clock.ms)
  assert.equal(summary?.requests, 2)
  assert.equal(summary?.agents, 2)
  assert.equal(summary?.cached_share, 1_500 / 4_000)
  assert.match(render(summary!), /1,500 of 4,000 prompt tokens \(37\.5 %\)/)
})

test("a prefix is warm after any answer, for as long as was last said", () => {
  const before = { atMs: 0, keepS: 90 }
  for (const [header, known, laterMs, expected] of [
    ["warm; keep=240s", undefined, 239_999, "warm"],
    ["warm; keep=240", undefined, 240_000, "cold"],
    ["Warm;keep=1.5s", undefined, 1_000, "warm"],
    ["warm", undefined, 0, "unknown"],
    ["warm", before, 89_999, "warm"],
    ["cold", undefined, 239_999, "warm"],
    ["cold", undefined, 240_000, "cold"],
    ["cold", before, 89_999, "warm"],
    ["cold", before, 90_000, "cold"],
    ["tepid; keep=5", before, 0, "unknown"],
    [null, before, 0, "unknown"],
  ] as const)
    assert.equal(warmth(hear(header, known, 0), laterMs), expected, String(header))
  assert.equal(holds(undefined, 0, 3_600), false)
  assert.equal(holds(hear(null, undefined, 0), 3_599_999, 3_600), true)
  assert.equal(holds(hear(null, undefined, 0), 3_600_000, 3_600), false)
  assert.equal(isGone(undefined, 0), true)
  assert.equal(isGone(hear(null, undefined, 0), 1e12), false, "nobody said that it is gone")
})

test("what is kept is kept from the end of the answer on", async () => {
  const at = rig()
  const { ticket, headers } = await at.homeport.announce(from("ses_a"))
  const body = JSON.stringify({ messages: [{ role: "user", content: "x" }] })
  const response = await at.homeport.carry(ticket, "http://h/v1/chat/completions", { body, headers: new Headers(headers) }, async () => reply({ "x-homeport-cache": "warm; keep=60" }))
  at.clock.ms += 300_000
  await response.text()
  at.homeport.finished("ses_a", "prt_long", { input: 9, output: 1, cache: { read: 0, write: 0 } }, 0)
  assert.equal(warmth(at.store.open("ses_a", 0).heard[MODEL], at.clock.ms + 59_000), "warm")
})

test("cache keys where a provider wants them; the root's key for sub-agents", async () => {
  const cases: [string, "auto" | boolean | string[], boolean][] = [
    ["https://api.openai.com/v1/responses", "auto", true],
    ["https://notopenai.com/v1", "auto", false],
    ["http://127.0.0.1:8080/v1", "auto", false],
    ["http://127.0.0.1:8080/v1", true, true],
    ["http://127.0.0.1:8080/v1", ["lab"], true],
    ["https://api.openai.com/v1", ["other"], false],
  ]
  for (const [url, option, expected] of cases) assert.equal(wantsCacheKey(url, "lab", option), expected, url)
  assert.equal(ownHeader("https://api.x.ai/v1"), "x-grok-conv-id")
  const at = rig({ promptCacheKey: true })
  const { sent } = await turn(at, "ses_child", "hi", 0, 100, {}, "general")
  assert.equal((JSON.parse(sent) as { prompt_cache_key: string }).prompt_cache_key, "ses_a")
})

test("options: wrong ones are named and keep their defaults", () => {
  const { options, errors } = readOptions({ environment: "nowhere", toastTokens: -1, dataDri: "x", tools: "off", promptCacheKey: [1] })
  assert.equal(options.environment, "first-message")
  assert.equal(options.tools, "off")
  assert.deepEqual(errors.map((error) => error.split(" ")[0]), ["environment", "toastTokens", "dataDri", "promptCacheKey"])
  assert.equal(readOptions("x").errors.length, 1)
})

test("the store: damaged and foreign files are ignored, ids never leave the folder, the oldest are swept", () => {
  const dir = folder()
  mkdirSync(join(dir, "sessions"))
  writeFileSync(join(dir, "sessions", "ses_bad.json"), "{")
  const store = new Store(dir, 2)
  assert.equal(store.open("ses_bad", 0).books.requests, 0)
  store.save(store.open("../../etc", 0), 0)
  for (const [n, id] of ["ses_1", "ses_2", "ses_3"].entries()) store.save(store.open(id, n), n)
  store.sweep()
  assert.equal(new Store(dir, 2).all().length <= 2, true)
})

test("books keep unknown apart from zero", () => {
  const books = emptyBooks()
  const tokens = { input: 100, output: 1, cache: { read: 0, write: 0 } }
  enter(books, tokens, 0, { inputUsd: null, cachedUsd: null }, false)
  assert.equal(books.cachedTokens, null)
  enter(books, tokens, 0, { inputUsd: null, cachedUsd: null }, true)
  assert.equal(books.cachedTokens, 0)
  assert.equal(books.savedUsd, null)
  assert.equal(total([books, emptyBooks()]).cachedTokens, 0)
  assert.equal(lostTokens(null, tokens), 0)
  assert.equal(lostTokens(10_000, { input: 300, output: 0, cache: { read: 9_800, write: 0 } }), 0)
})

test("the gate lets foreign requests through untouched and strips its ticket", async (t) => {
  const seen: [string, Headers][] = []
  const original = globalThis.fetch
  t.after(() => (globalThis.fetch = original))
  globalThis.fetch = (async (input: unknown, init?: RequestInit) => {
    seen.push([String(input), new Headers(init?.headers)])
    return new Response("ok")
  }) as typeof fetch
  const bare = globalThis.fetch
  const close = watch("a", (_, url, init, send) => send(`${url}?carried`, init))
  const closeOther = watch("b", (_, url, init, send) => send(url, init))
  await fetch("http://x/", { headers: { [TICKET]: "a.1", keep: "1" } })
  await fetch("http://y/")
  await fetch("http://z/", { headers: { [TICKET]: "gone.1" } })
  assert.deepEqual(seen.map(([url]) => url), ["http://x/?carried", "http://y/", "http://z/"])
  for (const [, headers] of seen) assert.equal(headers.has(TICKET), false)
  close()
  assert.notEqual(globalThis.fetch, bare)
  closeOther()
  assert.equal(globalThis.fetch, bare)
})

test("usage is found across chunk seams and the bytes stay the same", async () => {
  const encoder = new TextEncoder()
  const parts = ['data: {"usage":{"prompt_tokens_details":{"cached_', 'tokens": 7', "}}}\n\n"]
  const stream = new ReadableStream<Uint8Array>({
    start(controller) {
      parts.forEach((part) => controller.enqueue(encoder.encode(part)))
      controller.close()
    },
  })
  let found = 0
  const response = watchUsage(new Response(stream, { status: 201, headers: { "x-a": "b" } }), () => found++)
  assert.equal(await response.text(), parts.join(""))
  assert.equal(response.status, 201)
  assert.equal(response.headers.get("x-a"), "b")
  assert.equal(found, 1)
})

test("the version is the package's", () => {
  const manifest = JSON.parse(readFileSync("package.json", "utf8")) as { version: string }
  assert.equal(manifest.version, VERSION)
})

test("nothing but the plugin is exported: OpenCode takes every exported function for one", async () => {
  assert.deepEqual(Object.keys(await import("../src/index.js")), ["default"])
  assert.equal(typeof plugin.server, "function")
})
