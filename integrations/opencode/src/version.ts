/** The version of this plugin, the same as in package.json (a test holds them together). */
export const VERSION = "0.1.0"
