"""Whether a configuration can work: settings that contradict each other, and engines that are not what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import aiohttp

from homeport_engines.registry import kind
from homeport_proxy.config import Backend, Config, ConfigError, missing_secrets
from homeport_proxy.fleet import connector
from homeport_proxy.loop import listener_tls
from homeport_proxy.probe import Alive, ProbeError, Prober, Served, client_tls, reason_of, request_headers
from homeport_proxy.splice import document_of


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found; ``where`` names the backend, region or path."""

    level: Literal["error", "warning"]
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.text}"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one engine answered; None or a text where it did not."""

    fault: str | None
    served: Served | None = None
    version: str | None = None
    models_fault: str | None = None
    telemetry_fault: str | None = None
    stranger: bool = False
    """Something answers there, but not as the engine that is configured."""

    @property
    def confirmed(self) -> bool:
        """Whether it answered as the engine that is configured."""
        return self.fault is None and not self.stranger


def offline(config: Config, *, insecure: bool = False) -> list[Finding]:
    """What can be seen without asking anybody; what would keep the proxy from starting anywhere is an error."""
    refusal = config.refuses_to_listen(insecure)
    open_to_all = [finding("error", refusal)] if refusal else []
    return [*open_to_all, *_single_backends(config), *_pools(config), *_models(config)]


def unreadable(config: Config, level: Literal["error", "warning"]) -> list[Finding]:
    """Keys, and the listener's certificate, that are named and cannot be read here."""
    lines = missing_secrets(config)
    try:
        listener_tls(config.listen)
    except ConfigError as error:
        lines += error.errors
    return [finding(level, line) for line in lines]


def guesses(config: Config) -> list[Finding]:
    """What asking the engines would tell for certain, guessed from the file."""
    return [
        Finding("warning", backend.name, f"url {backend.url} ends in /v1, which the proxy adds itself; leave it out")
        for _, backend in config.backends
        if _names_v1(backend)
    ]


async def online(config: Config, backends: Iterable[tuple[str, Backend]]) -> tuple[list[Finding], dict[str, Seen]]:
    """Ask every engine and peer; what it answered by backend comes along."""
    listed = list(backends)
    async with Prober(config.health.timeout_s) as prober:
        answers = await asyncio.gather(*(_ask(prober, backend) for _, backend in listed))
    seen = {backend.name: answer for (_, backend), answer in zip(listed, answers, strict=True)}
    findings = [finding for _, backend in listed for finding in _one_engine(backend, seen[backend.name])]
    findings += _served_models(config, listed, seen)
    findings += _pairs(listed, seen)
    findings += await _peers(config)
    return findings, seen


# the file alone


def finding(level: Literal["error", "warning"], line: str) -> Finding:
    """A fault of the configuration's own, ``where: what``."""
    where, _, text = line.partition(": ")
    return Finding(level, where, text) if text else Finding(level, "file", line)


def _single_backends(config: Config) -> Iterator[Finding]:
    for _, backend in config.backends:
        unable = _unable(backend)
        if unable is not None:
            yield Finding("error", backend.name, unable)
        if backend.kv_readback and backend.kv_transfer != "nixl":
            yield Finding("error", backend.name, "kv_readback works with kv_transfer nixl only; set it or drop it")
        try:
            client_tls(backend.tls)
        except ConfigError as error:
            yield Finding("error", backend.name, str(error))
    urls: dict[str, str] = {}
    for _, backend in config.backends:
        first = urls.setdefault(backend.url, backend.name)
        if first != backend.name:
            yield Finding("warning", backend.name, f"has the same url as {first}; one engine would be counted twice")


def _unable(backend: Backend) -> str | None:
    """Why a backend cannot hand over what its own settings ask for; None when it can, or need not."""
    if connector(backend) != "none":
        return None
    asked = backend.kv_transfer if backend.kv_transfer != "none" else backend.kv_store
    if asked == "none":
        without = "role prefill without kv_transfer or kv_store: its KV cannot reach a decode backend; set one"
        return without if backend.role == "prefill" else None
    known = ", ".join(kind(backend.engine).transfers) or "none"
    text = f"engine {backend.engine} cannot do {asked}; it can do {known}"
    if backend.engine == "sglang" and backend.kv_transfer in ("nixl", "mooncake"):
        # the engine's own option has these names
        text += f" ({asked} is its transport behind that; write kv_transfer: bootstrap)"
    return text


def _pools(config: Config) -> Iterator[Finding]:
    pools: dict[tuple[str, str], list[Backend]] = {}
    for region, backend in config.backends:
        pools.setdefault((region, backend.pool), []).append(backend)
    for (region, pool), backends in pools.items():
        prefills = [b for b in backends if b.role == "prefill"]
        serving = [b for b in backends if b.role != "prefill"]
        if prefills and serving:
            yield from _unpaired(pool, prefills, serving)
        elif not config.regions[region].discovery:  # which may find the other side
            yield from _one_sided(region, pool, prefills, serving)


def _one_sided(region: str, pool: str, prefills: list[Backend], serving: list[Backend]) -> Iterator[Finding]:
    for prefill in prefills:
        text = f"no decode or mixed backend in pool {pool} takes what it prefills; add one or correct the pool"
        yield Finding("error", prefill.name, text)
    decodes = ", ".join(b.name for b in serving if b.role == "decode")
    if decodes:
        text = f"pool {pool} has no prefill backend, so {decodes} will prefill by itself; add one, or say role: mixed"
        yield Finding("warning", f"regions.{region}", text)


def _unpaired(pool: str, prefills: list[Backend], serving: list[Backend]) -> Iterator[Finding]:
    """Backends of a pool without a partner, each reason once; those at fault on their own are told of already."""
    prefills = [b for b in prefills if _unable(b) is None]
    serving = [b for b in serving if _unable(b) is None]
    if not prefills or not serving:
        return
    told: set[str] = set()
    for backend in serving:
        if backend.role == "decode" and not any(_pair(prefill, backend) for prefill in prefills):
            why = why_not_paired(prefills[0], backend)
            told.add(why)
            yield Finding("error", backend.name, f"no prefill backend of pool {pool} can hand over to it: {why}")
    for prefill in prefills:
        why = why_not_paired(prefill, serving[0])
        if why not in told and not any(_pair(prefill, backend) for backend in serving):
            yield Finding("error", prefill.name, f"can hand over to no decode backend of pool {pool}: {why}")


def _pair(prefill: Backend, decode: Backend) -> bool:
    return why_not_paired(prefill, decode) == ""


def why_not_paired(prefill: Backend, decode: Backend) -> str:
    """Why KV cannot be handed from one backend to the other; empty when it can."""
    if prefill.engine != decode.engine:
        return f"{prefill.name} is {prefill.engine}, {decode.name} is {decode.engine}"
    ours, theirs = connector(prefill), connector(decode)
    if ours == "none" or theirs == "none":
        silent = prefill if ours == "none" else decode
        return f"{silent.name} has no kv_transfer or kv_store"
    if ours != theirs or (prefill.kv_transfer == "none" and prefill.kv_store != decode.kv_store):
        return f"{prefill.name} transfers by {_transport(prefill)}, {decode.name} by {_transport(decode)}"
    if prefill.kv_readback != decode.kv_readback:
        return f"kv_readback must be the same on {prefill.name} and {decode.name}"
    if prefill.spec is not None and decode.spec is not None and prefill.spec != decode.spec:
        return f"spec differs between {prefill.name} and {decode.name}; their KV would not fit"
    return ""


def _transport(backend: Backend) -> str:
    return backend.kv_transfer if backend.kv_transfer != "none" else f"store {backend.kv_store}"


def _models(config: Config) -> Iterator[Finding]:
    listed = [(region, backend) for region, backend in config.backends if backend.role != "prefill"]
    for index, model in enumerate(config.models):
        regions = model.regions or list(config.regions)
        open_ended = any(config.regions[name].kind == "peer" or config.regions[name].discovery for name in regions)
        may = [b for region, b in listed if region in regions and (b.models is None or model.name in b.models)]
        if not may and not open_ended:
            text = f"no decode or mixed backend in {', '.join(regions)} lists {model.name!r}"
            yield Finding("error", f"models[{index}]", text)


# asking


async def _ask(prober: Prober, backend: Backend) -> Seen:
    alive, fault = await prober.alive(backend)
    if alive is Alive.REFUSED:
        return Seen(f"{fault}; is the engine running? look at host and port")
    if fault is not None:
        return Seen(fault)
    try:
        served = await prober.served(backend)
    except ProbeError as error:
        if error.no_such_page:
            return await _stranger(prober, backend, error)
        return Seen(None if error.status else str(error), models_fault=str(error))
    version = telemetry_fault = None
    if backend.engine == "vllm":
        try:
            version = str(document_of((await prober.get(backend, "/version")).encode())["version"])
        except (ProbeError, ValueError, KeyError):
            version = None
    path = kind(backend.engine).metrics_path
    if path is not None:
        try:
            await prober.get(backend, path)
        except ProbeError as error:
            telemetry_fault = str(error)
    return Seen(None, served, version, None, telemetry_fault)


async def _stranger(prober: Prober, backend: Backend, error: ProbeError) -> Seen:
    """What has no `/v1/models`: a fault, unless the engine's own health page or listed models speak for it."""
    if backend.models is None:
        try:
            await prober.get(backend, kind(backend.engine).health_path)
        except ProbeError:
            return Seen(f"{error}, so it is no OpenAI-compatible server; {_other_url(backend)}")
    return Seen(None, models_fault=str(error), stranger=True)


def _names_v1(backend: Backend) -> bool:
    return backend.url.endswith("/v1")


def _other_url(backend: Backend) -> str:
    """What to try where a url leads to no engine."""
    if _names_v1(backend):
        return "leave out the /v1 at the end of the url, the proxy adds it itself"
    return "look at host, port and path of the url"


def _one_engine(backend: Backend, seen: Seen) -> Iterator[Finding]:
    if seen.fault is not None:
        yield Finding("error", backend.name, f"{backend.url} cannot be used: {seen.fault}")
        return
    if seen.stranger:
        text = f"does not look like {backend.engine}: {backend.url}{seen.models_fault}; {_other_url(backend)}"
        yield Finding("warning", backend.name, text)
        return
    if seen.served is None:
        yield Finding("warning", backend.name, f"its models cannot be determined: {seen.models_fault}")
        return
    for model in backend.models or ():
        if model not in seen.served.models:
            serves = ", ".join(sorted(seen.served.models)) or "none"
            yield Finding("error", backend.name, f"does not serve {model!r}; it serves {serves}")
    if seen.telemetry_fault is not None:
        yield Finding("warning", backend.name, f"its load cannot be determined: {seen.telemetry_fault}")


def _served_models(config: Config, listed: list[tuple[str, Backend]], seen: Mapping[str, Seen]) -> Iterator[Finding]:
    for model in config.models:
        regions = model.regions or list(config.regions)
        if any(config.regions[name].kind == "peer" for name in regions):
            continue
        candidates = [
            backend
            for region, backend in listed
            if region in regions and (backend.models is None or model.name in backend.models)
        ]
        answered = [(b, served) for b in candidates if (served := seen[b.name].served) is not None]
        missing = [(b, served) for b, served in answered if b.models is None and model.name not in served.models]
        serving = [b for b, served in answered if model.name in served.models]
        # a fleet may serve several models on different engines: an engine without this one is at fault only when
        # it serves none of the file's, or when nobody serves it
        for backend, served in missing:
            if not serving or not any(other.name in served.models for other in config.models):
                serves = ", ".join(sorted(served.models)) or "none"
                text = f"does not serve {model.name!r}; it serves {serves}"
                yield Finding("error", backend.name, text)


def _pairs(listed: list[tuple[str, Backend]], seen: Mapping[str, Seen]) -> Iterator[Finding]:
    for region, prefill in listed:
        if prefill.role != "prefill":
            continue
        for other, decode in listed:
            if other == region and decode.role != "prefill" and decode.pool == prefill.pool and _pair(prefill, decode):
                yield from _pair_seen(prefill, decode, seen[prefill.name], seen[decode.name])


def _pair_seen(prefill: Backend, decode: Backend, ours: Seen, theirs: Seen) -> Iterator[Finding]:
    if ours.served is None or theirs.served is None:
        return
    if not ours.served.models & theirs.served.models:
        text = f"serves no model that {decode.name} serves; the pair must serve the same one"
        yield Finding("error", prefill.name, text)
    lengths = (ours.served.max_model_len, theirs.served.max_model_len)
    if None not in lengths and lengths[0] != lengths[1]:
        text = f"its context of {lengths[0]} tokens differs from {decode.name}'s {lengths[1]}; the smaller one counts"
        yield Finding("warning", prefill.name, text)
    if prefill.engine != "vllm":
        return
    if ours.version is None or theirs.version is None:
        text = f"whether {decode.name} runs the same vLLM version cannot be determined"
        yield Finding("warning", prefill.name, text)
    elif ours.version != theirs.version and prefill.kv_transfer != "none":
        text = f"runs vLLM {ours.version}, {decode.name} {theirs.version}; KV goes between equal versions only"
        yield Finding("error", prefill.name, text)


async def _peers(config: Config) -> list[Finding]:
    findings: list[Finding] = []
    timeout = aiohttp.ClientTimeout(total=config.health.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for name, region in config.regions.items():
            if region.proxy is None:
                continue
            try:
                headers = request_headers(region, region.headers)
                url = f"{region.proxy}/homeport/v1/region"
                async with session.get(url, headers=headers, ssl=client_tls(region.tls)) as answer:
                    if answer.status != 200:
                        findings.append(Finding("error", name, f"{region.proxy} answers {answer.status} to its peers"))
            except (aiohttp.ClientError, OSError, TimeoutError, ConfigError) as error:
                why = str(error) or type(error).__name__
                if isinstance(error, aiohttp.ClientConnectorError):
                    why = reason_of(error.os_error)
                findings.append(Finding("error", name, f"{region.proxy} cannot be reached: {why}"))
    return findings
