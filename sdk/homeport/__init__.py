"""Homeport: keeps an agent's prompt prefix still, its session at home, and the books on both."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from homeport._version import __version__

if TYPE_CHECKING:
    from homeport.breaks import Blame, CacheBreak, Reason
    from homeport.explain import explain
    from homeport.failures import failures
    from homeport.ledger import Ledger
    from homeport.prices import PriceBook
    from homeport.report import SessionReport
    from homeport.runtime import configure, finish, free_moment, report
    from homeport.session import Session, affinity_id, current, session
    from homeport.stabilise import Change, Plan, State, stabilise
    from homeport.transport import async_transport, attach, transport
    from homeport.usage import Usage
    from homeport.volatile import volatile

# imported when first asked for, so that `import homeport` costs nothing
_HOMES = {
    "Blame": "breaks", "CacheBreak": "breaks", "Reason": "breaks", "explain": "explain", "failures": "failures",
    "Ledger": "ledger", "PriceBook": "prices", "SessionReport": "report", "configure": "runtime", "finish": "runtime",
    "free_moment": "runtime", "report": "runtime", "Session": "session", "affinity_id": "session",
    "current": "session", "session": "session", "Change": "stabilise", "Plan": "stabilise", "State": "stabilise",
    "stabilise": "stabilise", "async_transport": "transport", "attach": "transport", "transport": "transport",
    "Usage": "usage", "volatile": "volatile",
}  # fmt: skip

__all__ = [
    "Blame",
    "CacheBreak",
    "Change",
    "Ledger",
    "Plan",
    "PriceBook",
    "Reason",
    "Session",
    "SessionReport",
    "State",
    "Usage",
    "__version__",
    "affinity_id",
    "async_transport",
    "attach",
    "configure",
    "current",
    "explain",
    "failures",
    "finish",
    "free_moment",
    "report",
    "session",
    "stabilise",
    "transport",
    "volatile",
]


class _Package(ModuleType):
    """Some public names are also names of modules (``session``). Importing such a module would bind it over the name;
    here the public name stays what it is, and the module is reached by import."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


_MODULES = frozenset({"adapters", "mcp", "providers", "testing"})


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        if name in _MODULES:
            return import_module(f"homeport.{name}")
        raise AttributeError(f"module 'homeport' has no attribute {name!r}")
    value: object = getattr(import_module(f"homeport.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
