"""Routing policy: pure functions and plain state, driven by a clock that the caller holds."""
