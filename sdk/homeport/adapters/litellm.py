"""LiteLLM: ``litellm.install()`` before the first completion.

LiteLLM sends everything that speaks OpenAI's protocol (``openai/...``, own servers by ``api_base``) over two shared
clients, which are set here. Providers with a handler of their own (Anthropic, Bedrock, Vertex, ...) get a client of
their own when they are first used: LiteLLM's two handler classes are told to attach each that they make.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, Unpack

import httpx
import litellm
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler

from homeport.failures import failed
from homeport.transport import Options, attach

T = TypeVar("T")


def install(timeout_s: float = 600.0, **options: Unpack[Options]) -> None:
    """Give LiteLLM an attached sync and async HTTP client; those it was given or has made before are attached and
    kept."""
    if litellm.client_session is None:
        litellm.client_session = httpx.Client(timeout=timeout_s, follow_redirects=True)
    if litellm.aclient_session is None:
        litellm.aclient_session = httpx.AsyncClient(timeout=timeout_s, follow_redirects=True)
    attach(litellm.client_session, **options)
    attach(litellm.aclient_session, **options)
    _made.options = options
    for handler_class in (HTTPHandler, AsyncHTTPHandler):
        make = getattr(handler_class, "create_client", None)
        if make is not None and not hasattr(make, "__wrapped__"):
            setattr(handler_class, "create_client", _attaching(make))  # noqa: B010  # a method, to the type checker
    for known in _known_handlers():
        _made.attach(known.client)


class _Made:
    """Attaches what LiteLLM makes, with the options of the last :func:`install`."""

    options: Options = Options()

    def attach(self, client: T) -> T:
        try:
            return attach(client, **self.options)
        except Exception as error:  # LiteLLM goes on without us
            failed("litellm", error)
            return client


_made = _Made()


def _attaching(make: Callable[..., T]) -> Callable[..., T]:
    return wraps(make)(lambda *args, **kwargs: _made.attach(make(*args, **kwargs)))


def _known_handlers() -> list[HTTPHandler | AsyncHTTPHandler]:
    """Handlers that LiteLLM made before: the module's own and those in its cache."""
    cache = getattr(getattr(litellm, "in_memory_llm_clients_cache", None), "cache_dict", {})
    # asked for by name they would be made now
    modules = [vars(litellm).get(name) for name in ("module_level_client", "module_level_aclient")]
    return [one for one in [*modules, *cache.values()] if isinstance(one, (HTTPHandler, AsyncHTTPHandler))]


def handler(timeout_s: float = 600.0, **options: Unpack[Options]) -> HTTPHandler:
    """An attached HTTP handler for one call, ``litellm.completion(client=...)``, without :func:`install`."""
    return HTTPHandler(client=attach(httpx.Client(timeout=timeout_s, follow_redirects=True), **options))
