"""Anything may be sent to any endpoint: the answer is never our 500, never a traceback, and never a crash."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from faults.harbour import Harbour, harbour

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/m",
    "/v1/responses/resp_1",
    "/v1/audio/speech",
    "/v1/../v1/models",
    "/v1/%2e%2e/metrics",
    "/tokenize",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/homeport",
    "/homeport/v1/status",
    "/homeport/v1/sessions/abc",
    "/homeport/v1/sessions/abc/finish",
    "/homeport/v1/requests/req_1",
    "/homeport/v1/decisions",
    "/homeport/v1/backends/m0/drain",
    "/homeport/v1/backends/m0/undrain",
    "/homeport/v1/backends/nobody/drain",
    "/homeport/v1/ledger",
    "/",
    "/nothing",
)
METHODS = ("GET", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
_NAMES = (
    "model messages role content tools tool_choice stream stream_options include_usage max_tokens n input "
    "prompt system metadata user_id session_id user prompt_cache_key kv_transfer_params do_remote_prefill "
    "bootstrap_room cache_salt priority response_format previous_response_id conversation instructions "
    "text type function name parameters id stop temperature x"
)
NAMES = _NAMES.split()
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(["m", "user", "system"])
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), inner, max_size=5)
    ),
    max_leaves=12,
)
bodies = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), values, max_size=8).map(
        lambda body: json.dumps({"model": "m", **body}).encode("utf-8", "surrogatepass")
    ),
    values.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
    st.binary(max_size=200),
    st.just(b""),
    st.sampled_from(
        [b"[" * 50_000, b'{"a":' * 20_000, b'{"model":"m","messages":' + b"[" * 5_000, b"\xff\xfe{", b"NaN"]
    ),
)
_HEADERS = (
    "x-session-affinity x-session-id x-homeport-kind x-homeport-final x-homeport-hops x-request-id "
    "authorization x-api-key x-data-parallel-rank content-type accept-encoding anthropic-version "
    "x-claude-code-session-id thread-id expect x-parent-session-id endpoint-load-metrics-format origin "
    "x-forwarded-for content-encoding range"
)
header_names = st.sampled_from(_HEADERS.split())
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(str.strip)
headers = st.dictionaries(header_names, header_values, max_size=4)
QUERIES = st.sampled_from(
    ["", "?limit=x", "?by=tenant,model,day&format=csv", "?by=%00", "?limit=-1", "?a=b&a=c", "?%ff"]
)


class Alarms(logging.Handler):
    """Collects what a person would see as a crash."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR or "Traceback" in record.getMessage():
            self.seen.append(f"{record.name}: {record.getMessage()} {record.exc_info}")


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Harbour, Alarms]]:
    alarms = Alarms()
    logging.getLogger().addHandler(alarms)
    try:
        async with harbour({"p0": "prefill", "d0": "decode", "m0": "mixed"}, lease_s=0.3) as fleet:
            yield fleet, alarms
            alarms.seen += [f"engine died {n}" for n, e in fleet.engines.items() if e.books.deaths]
    finally:
        logging.getLogger().removeHandler(alarms)


async def fire(fleet: Harbour, method: str, path: str, sent: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """One request as raw as a client can make it."""
    url = fleet.url + path
    async with asyncio.timeout(30):
        async with fleet.http.request(method, URL(url, encoded=True), headers=sent, data=body) as answer:
            return answer.status, await answer.read()


async def fuzz(examples: int) -> None:
    loop = asyncio.get_running_loop()
    async with watched() as (fleet, alarms):

        def check(method: str, path: str, query: str, sent: dict[str, str], body: bytes) -> None:
            work = asyncio.run_coroutine_threadsafe(fire(fleet, method, path + query, sent, body), loop)
            try:
                status, answer = work.result(60)
            except aiohttp.ClientError:
                return  # what no HTTP client may send
            assert status != 500, (status, answer)
            assert b"Traceback" not in answer
            assert b'"code":"internal"' not in answer
            assert b'"remote_block_ids"' not in answer
            assert b'"kv_transfer_params":' not in answer, (status, answer)  # an engine may quote a client's own word
            seen, alarms.seen = alarms.seen, []  # of this request alone, so that it can be told from others
            assert not seen, seen

        run = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)(
            given(st.sampled_from(METHODS), st.sampled_from(PATHS), QUERIES, headers, bodies)(check)
        )
        await asyncio.to_thread(run)
        assert not alarms.seen, alarms.seen
        await fleet.at_rest()
        async with fleet.http.post(fleet.url + "/homeport/v1/backends/m0/undrain"):
            assert (await fleet.chat("still here")).status == 200


async def test_fuzz() -> None:
    await fuzz(120)


@pytest.mark.long
async def test_fuzz_long() -> None:
    await fuzz(4000)


RAW: list[Any] = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00\x01\x02\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET http://other.example/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT other.example:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!",
]


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
async def test_what_is_hardly_http(raw: bytes) -> None:
    async with watched() as (fleet, alarms):
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        try:
            async with asyncio.timeout(2):
                got = await reader.read(65536)
        except (TimeoutError, ConnectionError):
            got = b""  # it waits for the rest, or has cut us off
        writer.close()
        assert b" 500 " not in got.split(b"\r\n")[0]
        assert b"Traceback" not in got
        assert not alarms.seen, alarms.seen
        assert (await fleet.chat("still here")).status == 200
