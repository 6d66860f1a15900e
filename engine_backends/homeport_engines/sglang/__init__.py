"""SGLang: wire, launch and telemetry."""
