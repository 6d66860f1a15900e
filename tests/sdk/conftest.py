"""Every test begins with a process that knows no session, no declaration and no failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import homeport.runtime
from homeport import mcp
from homeport.failures import reset_failures
from homeport.volatile import forget_declared


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reset_failures()
    forget_declared()
    mcp.forget()
    runtime = homeport.runtime.Runtime()
    monkeypatch.setattr(homeport.runtime, "_runtime", runtime)
    yield
    homeport.runtime.drain()
    runtime.ledger.close()
