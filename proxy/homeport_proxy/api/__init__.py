"""The client APIs: one module each, and the table that finds them by path."""

from __future__ import annotations

from collections.abc import Mapping

from homeport_proxy.api.base import ClientApi
from homeport_proxy.api.chat import CHAT
from homeport_proxy.api.completions import COMPLETIONS
from homeport_proxy.api.messages import MESSAGES
from homeport_proxy.api.plain import COUNT_TOKENS, EMBEDDINGS, OTHER, TOKENIZE
from homeport_proxy.api.responses import RESPONSES

BY_PATH: Mapping[str, ClientApi] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDINGS,
    "/tokenize": TOKENIZE,
}


def of_path(path: str) -> ClientApi:
    """The API a normalised path belongs to."""
    return BY_PATH.get(path, OTHER)
