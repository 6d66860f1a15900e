"""What Homeport knows of each engine: wire protocol, KV hand-off, launch, telemetry, emulator."""
