"""An engine that computes no text and keeps true books.

The test kit of Homeport and the planner's engine: vLLM's HTTP surface over a paged prefix cache, a prefill queue, a
decode batch, KV hand-off with leases, KV events and metrics, with faults on command.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homeport_engines.emulator.answers import Rule, Script, parse_rules
    from homeport_engines.emulator.books import Books, Record
    from homeport_engines.emulator.faults import Fault, Faults
    from homeport_engines.emulator.server import Emulator
    from homeport_engines.emulator.settings import CacheGroup, EmulatorSettings, Rates, Speculation

# imported when first asked for: `homeport engine` reads the emulator's options without its server
_HOMES = {
    "Books": "books", "CacheGroup": "settings", "Emulator": "server", "EmulatorSettings": "settings",
    "Fault": "faults", "Faults": "faults", "Rates": "settings", "Record": "books", "Rule": "answers",
    "Script": "answers", "Speculation": "settings", "parse_rules": "answers",
}  # fmt: skip

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


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
