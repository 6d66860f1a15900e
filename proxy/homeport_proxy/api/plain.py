"""APIs that generate nothing: embeddings, tokenize, count_tokens, and whatever else lies under ``/v1/``."""

from __future__ import annotations

from homeport_proxy.api.base import ClientApi, never, no_usage, unchanged
from homeport_proxy.api.chat import read_usage
from homeport_proxy.exchange import ApiName


def _plain(name: ApiName) -> ClientApi:
    return ClientApi(name, False, never, never, never, unchanged, no_usage)


EMBEDDINGS = ClientApi("embeddings", False, never, never, never, unchanged, read_usage)
TOKENIZE = _plain("tokenize")
COUNT_TOKENS = _plain("count_tokens")
OTHER = _plain("other")
