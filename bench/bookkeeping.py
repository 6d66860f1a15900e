"""What the books of one request cost: metrics by hand against prometheus_client, and the whole of `account.done`.

python -m bench.bookkeeping
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import prometheus_client as prom
from multidict import CIMultiDict, CIMultiDictProxy

from homeport_proxy import config as configuration
from homeport_proxy.account import Account
from homeport_proxy.exchange import Exchange, Identity, LegRecord, State, TokenUsage
from homeport_proxy.observe.logs import AccessLog
from homeport_proxy.observe.metrics import FINE_SECONDS, SECONDS, Metrics
from homeport_proxy.routing.views import Decision, Outcome, Word

ROUNDS = 20_000


def per_call_us(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Microseconds of this thread's CPU that a call takes: the quickest of five runs."""
    best_s = float("inf")
    for _ in range(5):
        began_s = time.thread_time()
        for _ in range(rounds):
            call()
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s / rounds * 1e6


def by_hand() -> Callable[[], None]:
    """The series a request touches, in Homeport's own metrics."""
    metrics = Metrics()

    def book() -> None:
        metrics.requests.add(1, ("chat", "m", "", "home", "200"))
        metrics.queue.observe(0.001)
        metrics.ttft.observe(0.2)
        metrics.overhead.observe(0.0003)
        metrics.prompt_tokens.add(900, ("m", "", "cached"))
        metrics.prompt_tokens.add(100, ("m", "", "fresh"))
        metrics.output_tokens.add(50, ("m", ""))
        metrics.cache_miss_tokens.add(90, ("m", "new"))
        metrics.cache_miss_tokens.add(10, ("m", "template"))
        metrics.transfers.add(1, ("d0", "ok"))

    return book


def by_prometheus_client() -> Callable[[], None]:
    """The same series with prometheus_client."""
    registry = prom.CollectorRegistry()
    requests = prom.Counter("r", "r", ("api", "model", "tenant", "decision", "code"), registry=registry)
    prompt = prom.Counter("p", "p", ("model", "tenant", "kind"), registry=registry)
    output = prom.Counter("o", "o", ("model", "tenant"), registry=registry)
    misses = prom.Counter("c", "c", ("model", "cause"), registry=registry)
    transfers = prom.Counter("t", "t", ("backend", "outcome"), registry=registry)
    queue, ttft, overhead = (prom.Histogram(n, n, buckets=SECONDS, registry=registry) for n in ("q", "f", "v"))

    def book() -> None:
        requests.labels("chat", "m", "", "home", "200").inc()
        queue.observe(0.001)
        ttft.observe(0.2)
        overhead.observe(0.0003)
        prompt.labels("m", "", "cached").inc(900)
        prompt.labels("m", "", "fresh").inc(100)
        output.labels("m", "").inc(50)
        misses.labels("m", "new").inc(90)
        misses.labels("m", "template").inc(10)
        transfers.labels("d0", "ok").inc()

    return book


def exchange() -> Exchange:
    """A finished request over two engines."""
    made = Exchange(
        "r1", "chat", "POST", "/v1/chat/completions", "", CIMultiDictProxy(CIMultiDict()), None, 10.0, 1.7e9
    )
    made.model, made.status, made.body = "m", 200, b"x" * 4000
    made.identity = Identity("5e551017", "x-session-id")
    made.decision = Decision("d0", Word.HOME, "home", prefill_place="p0", expected_cached_tokens=900)
    made.legs = [
        LegRecord("p0", "prefill", "r1-0", State.HANDED_OFF, 200, None, 10.01, 10.1, 10.1, 10.2),
        LegRecord("d0", "serve", "r1-1", State.DONE, 200, None, 10.2, 10.3, 10.3, 10.9),
    ]
    made.usage, made.kv_transfer = TokenUsage(1000, 900, 50), "ok"
    made.outcome = Outcome(1000, 900, {"new": 90, "template": 10})
    made.first_token_s, made.ended_s, made.queued_s = 10.3, 10.9, 0.001
    return made


def main() -> None:
    """Print the figures."""
    config = configuration.parse("regions: {r: {backends: [{name: d0, url: 'http://127.0.0.1:1'}]}}")
    sink = io.StringIO()
    logged = [AccessLog(config.log, sink)]
    account = Account(config, Metrics(), lambda name: name == "m", logged)
    one = exchange()
    itl = Metrics().itl
    prom_itl = prom.Histogram("i", "i", buckets=FINE_SECONDS, registry=prom.CollectorRegistry())
    print(f"series of one request, by hand            {per_call_us(by_hand()):6.2f} us")
    print(f"series of one request, prometheus_client  {per_call_us(by_prometheus_client()):6.2f} us")
    print(f"one gap between chunks, by hand           {per_call_us(lambda: itl.observe(0.02)):6.2f} us")
    print(f"one gap between chunks, prometheus_client {per_call_us(lambda: prom_itl.observe(0.02)):6.2f} us")
    print(f"all books of one request, ledger and log  {per_call_us(lambda: account.done(one), 6_400):6.2f} us")
    account.close()


if __name__ == "__main__":
    main()
