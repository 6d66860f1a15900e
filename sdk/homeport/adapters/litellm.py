"""LiteLLM: ``litellm.install()`` before the first completion.

LiteLLM sends everything that speaks OpenAI's protocol (``openai/...``, own servers by ``api_base``) over the two shared
clients that are set here. For providers with a handler of its own pass ``client=handler()``.
"""

from __future__ import annotations

from typing import Unpack

import httpx
import litellm
from litellm.llms.custom_httpx.http_handler import HTTPHandler

from homeport.transport import Options, attach


def install(timeout_s: float = 600.0, **options: Unpack[Options]) -> None:
    """Give LiteLLM an attached sync and async HTTP client; those it was given before are attached and kept."""
    if litellm.client_session is None:
        litellm.client_session = httpx.Client(timeout=timeout_s, follow_redirects=True)
    if litellm.aclient_session is None:
        litellm.aclient_session = httpx.AsyncClient(timeout=timeout_s, follow_redirects=True)
    attach(litellm.client_session, **options)
    attach(litellm.aclient_session, **options)


def handler(timeout_s: float = 600.0, **options: Unpack[Options]) -> HTTPHandler:
    """An attached HTTP handler for ``litellm.completion(client=...)`` with providers that have their own."""
    return HTTPHandler(client=attach(httpx.Client(timeout=timeout_s, follow_redirects=True), **options))
