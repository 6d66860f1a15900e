// The Vercel AI SDK, unchanged, against the base URL in argv[2]; prints one JSON object: what each provider brought.
import { createAnthropic } from "@ai-sdk/anthropic"
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { generateText, Output, stepCountIs, streamText, tool } from "ai"
import { z } from "zod"

const baseURL = `${process.argv[2]}/v1`
const openai = createOpenAI({ baseURL, apiKey: "-" })
const models = {
  chat: openai.chat("m"),
  responses: openai.responses("m"),
  messages: createAnthropic({ baseURL, apiKey: "-" })("m"),
  compatible: createOpenAICompatible({ baseURL, name: "homeport", includeUsage: true, supportsStructuredOutputs: true })("m"),
}
const weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
})
const LONG = "The harbour has many berths. ".repeat(200)

async function streamed(model) {
  const errors = []
  const answer = streamText({ model, system: LONG, prompt: "Say something.", maxOutputTokens: 64, onError: ({ error }) => errors.push(String(error)) })
  let text = ""
  let pieces = 0
  for await (const piece of answer.textStream) {
    text += piece
    pieces += 1
  }
  return { text, pieces, errors, finish: await answer.finishReason, usage: await answer.usage }
}

async function withTools(model) {
  const answer = await generateText({ model, system: LONG, prompt: "What is the weather in Oslo?", tools: { weather }, stopWhen: stepCountIs(3), maxOutputTokens: 64 })
  const calls = answer.steps.flatMap((step) => step.toolCalls.map((call) => call.input))
  return { text: answer.text, steps: answer.steps.length, calls, usage: answer.usage }
}

async function streamedTools(model) {
  const answer = streamText({ model, system: LONG, prompt: "What is the weather in Oslo?", tools: { weather }, stopWhen: stepCountIs(3), maxOutputTokens: 64 })
  return { text: await answer.text, steps: (await answer.steps).length }
}

async function structured(model) {
  const schema = z.object({ name: z.string(), berths: z.number().int() })
  const answer = await generateText({ model, prompt: "Describe a harbour.", output: Output.object({ schema }), maxOutputTokens: 256 })
  return schema.parse(answer.output)
}

async function left(model) {
  const control = new AbortController()
  const answer = streamText({ model, prompt: "Say something long.", abortSignal: control.signal, maxOutputTokens: 4000, onError: () => {} })
  for await (const _ of answer.textStream) {
    control.abort()
  }
  return true
}

async function refused(make) {
  try {
    await generateText({ model: make("absent"), prompt: "hello", maxRetries: 0 })
    return null
  } catch (error) {
    return { status: error.statusCode, message: error.message }
  }
}

const found = {}
for (const [name, model] of Object.entries(models)) {
  found[name] = {}
  for (const [what, run] of Object.entries({ streamed, again: streamed, withTools, streamedTools, structured, left })) {
    try {
      found[name][what] = await run(model)
    } catch (error) {
      found[name][what] = { failed: `${error}`, cause: `${error.cause ?? ""}` }
    }
  }
}
found.refused = { chat: await refused(openai.chat), messages: await refused(createAnthropic({ baseURL, apiKey: "-" })) }
console.log(JSON.stringify(found))
