"""Every test begins with a process that knows no session, no declaration and no failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import homeport.runtime
from homeport import mcp
from homeport.failures import reset_failures
from homeport.volatile import forget_declared

# how fast inputs are drawn says how busy the machine is, and nothing of the code
settings.register_profile("homeport-sdk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("homeport-sdk")


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
