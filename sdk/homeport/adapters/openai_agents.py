"""OpenAI Agents SDK: ``openai_agents.install()`` before the first run.

Outside a ``with homeport.session(...)`` block the conversation is the trace's ``group_id``
(``RunConfig(group_id=...)``), the SDK's own name for one chat thread.
"""

from __future__ import annotations

from typing import Unpack

from agents import get_current_trace, set_default_openai_client
from openai import AsyncOpenAI

from homeport.session import Session
from homeport.transport import Options, attach


def install(client: AsyncOpenAI | None = None, **options: Unpack[Options]) -> AsyncOpenAI:
    """Attach ``client`` (default: one from the environment) and make it the default of all agents; returns it."""
    options.setdefault("session", session_of_trace)
    attached = attach(AsyncOpenAI() if client is None else client, **options)
    set_default_openai_client(attached, use_for_tracing=False)
    return attached


def session_of_trace() -> Session | None:
    """The session that the current trace's group names; None outside a trace or without a group."""
    group = getattr(get_current_trace(), "group_id", None)
    return Session(group) if isinstance(group, str) and group else None
