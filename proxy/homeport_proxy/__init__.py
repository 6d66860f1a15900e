"""The affinity-aware proxy: server, identity, routing, hand-off, relay, accounting."""
