// An OpenCode plugin for tests: a random model never stops by itself, so answers are short.
export default {
  id: "brief",
  server: async () => ({
    "chat.params": async (_, output) => {
      output.maxOutputTokens = 16
    },
  }),
}
