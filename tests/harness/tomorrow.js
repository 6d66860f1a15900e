// An OpenCode plugin for tests: the clock is HOMEPORT_TEST_DAYS days ahead, for all of OpenCode and its plugins.
const RealDate = globalThis.Date
const aheadMs = Number(process.env.HOMEPORT_TEST_DAYS ?? 0) * 86_400_000

class ShiftedDate extends RealDate {
  constructor(...given) {
    super(...(given.length === 0 ? [RealDate.now() + aheadMs] : given))
  }
  static now() {
    return RealDate.now() + aheadMs
  }
}

export default {
  id: "tomorrow",
  server: async () => {
    if (aheadMs) globalThis.Date = ShiftedDate
    return {}
  },
}
