// New folders for tests; they go with the process.
import { mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"

const root = mkdtempSync(join(tmpdir(), "homeport-"))
process.once("exit", () => rmSync(root, { recursive: true, force: true }))

export const folder = (): string => mkdtempSync(join(root, "test-"))
