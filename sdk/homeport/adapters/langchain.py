"""LangChain and LangGraph: ``model = langchain.attach(ChatOpenAI(...))``.

Outside a ``with homeport.session(...)`` block the conversation is the run's ``thread_id``
(``config={"configurable": {"thread_id": ...}}``), LangGraph's own name for one; a subgraph is a sub-agent of it.
"""

from __future__ import annotations

from typing import TypeVar, Unpack

from langchain_core.runnables.config import var_child_runnable_config

from homeport.session import Session
from homeport.transport import Options
from homeport.transport import attach as attach_client

T = TypeVar("T")


def attach(model: T, **options: Unpack[Options]) -> T:
    """Attach the sync and the async client of a chat model on the openai or anthropic SDK; returns the model."""
    options.setdefault("session", session_of_thread)
    for place in ("_client", "_async_client"):
        getattr(model, place, None)  # langchain-anthropic makes its clients when first asked for them
    return attach_client(model, **options)


def session_of_thread() -> Session | None:
    """The session that the running graph's thread names; None outside a run or without a thread."""
    config = var_child_runnable_config.get()
    configurable = (config or {}).get("configurable") or {}
    thread = configurable.get("thread_id")
    if thread is None or thread == "":
        return None
    # checkpoint_ns is "node:task" at the top and "node:task|inner:task" inside a subgraph; task ids are new each time
    graphs = [step.partition(":")[0] for step in str(configurable.get("checkpoint_ns") or "").split("|")]
    if len(graphs) > 1:
        return Session(f"{thread}/{'/'.join(graphs[:-1])}", parent=str(thread), kind="subagent")
    return Session(str(thread))
