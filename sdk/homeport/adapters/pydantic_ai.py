"""pydantic-ai: ``agent = pydantic_ai.attach(Agent(...))``, or a model instead of an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, Unpack

from pydantic_ai import Agent
from pydantic_ai.models import Model, infer_model

from homeport.transport import Options
from homeport.transport import attach as attach_client

T = TypeVar("T")


def attach(thing: T, **options: Unpack[Options]) -> T:
    """Attach the client of an agent's model, or of a model; returns the same object.

    A provider that makes its HTTP client itself makes a new one when that is closed; the new one is attached as well.
    Raises TypeError for a model without an HTTP client of its own (test and function models).
    """
    for model in _models(thing):
        provider = getattr(model, "_provider", None)
        client = getattr(model, "client", None) or getattr(provider, "client", None)
        if client is None:
            raise TypeError(f"{type(model).__name__} has no HTTP client to attach")
        attach_client(client, **options)
        factory = getattr(provider, "_http_client_factory", None)
        if provider is not None and factory is not None:
            provider._http_client_factory = _attached(factory, options)
    return thing


def _models(thing: object) -> list[object]:
    if isinstance(thing, Agent):
        if thing.model is None:
            raise TypeError("the agent has no model yet; attach the model that you pass to run()")
        if not isinstance(thing.model, Model):
            thing.model = infer_model(thing.model)
        thing = thing.model
    wrapped = getattr(thing, "wrapped", None)  # instrumented and other wrapper models
    if wrapped is not None:
        return _models(wrapped)
    several = getattr(thing, "models", None)  # fallback models
    return [one for model in several for one in _models(model)] if several else [thing]


def _attached(factory: Callable[[], T], options: Options) -> Callable[[], T]:
    return lambda: attach_client(factory(), **options)
