"""vLLM's client APIs: one module each turns a body into a job and the engine's steps into that API's answer."""
