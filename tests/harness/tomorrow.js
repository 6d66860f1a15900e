// An OpenCode plugin for tests: the clock is some days ahead, for all of OpenCode and its plugins. How many says
// HOMEPORT_TEST_DAYS, or, at any moment, the file that HOMEPORT_TEST_DAYS_FILE names.
import { readFileSync } from "node:fs"

const RealDate = globalThis.Date
const file = process.env.HOMEPORT_TEST_DAYS_FILE

function aheadMs() {
  return Number(file ? readFileSync(file, "utf8") : (process.env.HOMEPORT_TEST_DAYS ?? 0)) * 86_400_000
}

class ShiftedDate extends RealDate {
  constructor(...given) {
    super(...(given.length === 0 ? [ShiftedDate.now()] : given))
  }
  static now() {
    return RealDate.now() + aheadMs()
  }
}

export default {
  id: "tomorrow",
  server: async () => {
    if (file || aheadMs()) globalThis.Date = ShiftedDate
    return {}
  },
}
