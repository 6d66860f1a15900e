"""The real-engine tier: one start of the pair for all of its tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from engines.engine_kit import Pair, running_pair

CLIENT_KEY = "the-clients-own-key"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The running pair; installs the engine first when it is missing."""
    with running_pair(tmp_path_factory.mktemp("engines"), sys.__stderr__) as running:
        yield running


@pytest.fixture
def client(pair: Pair) -> Iterator[OpenAI]:
    """An unchanged OpenAI client at the proxy, with a key the engines do not know."""
    with OpenAI(base_url=pair.base_url, api_key=CLIENT_KEY, max_retries=0, timeout=180) as found:
        yield found
