"""Engines and the proxy together on this machine: planned, started, watched and stopped as one."""
