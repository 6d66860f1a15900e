"""An engine that computes no text and keeps true books.

The test kit of Homeport and the planner's engine: vLLM's HTTP surface over a paged prefix cache, a prefill queue, a
decode batch, KV hand-off with leases, KV events and metrics, with faults on command.
"""

from homeport_engines.emulator.answers import Rule, Script, parse_rules
from homeport_engines.emulator.books import Books, Record
from homeport_engines.emulator.faults import Fault, Faults
from homeport_engines.emulator.server import Emulator
from homeport_engines.emulator.settings import CacheGroup, EmulatorSettings, Rates, Speculation

__all__ = [
    "Books",
    "CacheGroup",
    "Emulator",
    "EmulatorSettings",
    "Fault",
    "Faults",
    "Rates",
    "Record",
    "Rule",
    "Script",
    "Speculation",
    "parse_rules",
]
