/** Sees the requests of OpenCode's own providers on their way out, and no other: those that carry a ticket of ours. */

/** Set by the `chat.headers` hook, taken off here, never sent. */
export const TICKET = "x-homeport-ticket"

type Fetch = (input: RequestInfo | URL, init?: RequestInit) => Promise<Response>
/** Sends one ticketed request; `send` is the fetch that was there before. */
export type Carrier = (ticket: string, url: string, init: RequestInit, send: Fetch) => Promise<Response>

interface Gate {
  carriers: Map<string, Carrier>
  before: Fetch
  gate: Fetch
}

// OpenCode may load a plugin once per project folder: all instances share one gate
const KEY = Symbol.for("opencode-homeport.gate")
type Holder = typeof globalThis & { [KEY]?: Gate }

/** Let `carrier` handle requests whose ticket begins with `instance`; the returned function undoes it. */
export function watch(instance: string, carrier: Carrier): () => void {
  const holder = globalThis as Holder
  const gate = (holder[KEY] ??= open(holder))
  gate.carriers.set(instance, carrier)
  return () => {
    gate.carriers.delete(instance)
    if (gate.carriers.size > 0) return
    // somebody may have wrapped fetch after us: then ours stays below theirs and does nothing
    if (holder.fetch === (gate.gate as typeof fetch)) {
      holder.fetch = gate.before as typeof fetch
      delete holder[KEY]
    }
  }
}

function open(holder: Holder): Gate {
  const before = holder.fetch as Fetch
  const carriers = new Map<string, Carrier>()
  const through: Fetch = async (input, init) => {
    const headers = new Headers(init?.headers ?? (input instanceof Request ? input.headers : undefined))
    const ticket = headers.get(TICKET)
    if (ticket === null) return before(input, init)
    headers.delete(TICKET)
    const carrier = carriers.get(ticket.slice(0, ticket.indexOf(".")))
    const changed: RequestInit = { ...init, headers }
    if (!carrier || input instanceof Request) return before(input, changed)
    return carrier(ticket, String(input), changed, before)
  }
  const gate = Object.assign(through, before) as typeof fetch // keeps extras such as Bun's fetch.preconnect
  holder.fetch = gate
  return { carriers, before, gate }
}

const FIELDS = /"(?:cached_tokens|cache_read_input_tokens|prompt_cache_hit_tokens|cachedContentTokenCount)"\s*:\s*\d/
const SEAM_CHARS = 64

/** The same answer, whose body is watched on its way: `found` is called once if it reports cached tokens. */
export function watchUsage(response: Response, found: () => void): Response {
  if (!response.body) return response
  const decoder = new TextDecoder()
  let seam = ""
  let told = false
  const body = response.body.pipeThrough(
    new TransformStream<Uint8Array, Uint8Array>({
      transform(chunk, controller) {
        if (!told) {
          const text = seam + decoder.decode(chunk, { stream: true })
          told = FIELDS.test(text)
          if (told) found()
          seam = text.slice(-SEAM_CHARS)
        }
        controller.enqueue(chunk)
      },
    }),
  )
  return new Response(body, { status: response.status, statusText: response.statusText, headers: response.headers })
}
