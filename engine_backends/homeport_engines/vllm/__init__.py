"""vLLM: wire, launch, telemetry, KV events, and the CPU build used by tests and demos."""
