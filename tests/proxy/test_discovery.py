"""Discovery: a file, a name, a Kubernetes API; what fails keeps what was found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from homeport_proxy import config as cfg
from homeport_proxy.discovery import Discoverer, DiscoveryError, discover_once, find
from homeport_proxy.fleet import Fleet
from proxy.control_kit import serving, until


def config_of(source: str, base: Path | None = None, defaults: str = "{}") -> cfg.Config:
    text = f"regions: {{r: {{defaults: {defaults}, discovery: [{source}]}}}}\nhealth: {{interval_s: 0.02}}"
    return cfg.parse(text, base=base)


async def found_by(config: cfg.Config) -> dict[str, cfg.Backend]:
    region = config.regions["r"]
    return {backend.name: backend for backend in await find(region.discovery[0], region.defaults)}


async def test_a_file_lists_backends_with_the_regions_defaults(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "backends:\n- {name: a, url: 'http://a:1'}\n- {name: b, url: 'http://b', pool: q}\n"
    )
    config = config_of("{type: file, path: fleet.yaml}", tmp_path, "{role: decode, pool: p}")
    found = await found_by(config)
    assert {name: (b.role, b.pool) for name, b in found.items()} == {"a": ("decode", "p"), "b": ("decode", "q")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x: 1", "must be a list of backends"),
        ("- {name: a, ulr: 'http://a'}", "backends[0].url: is missing"),
        ("- {name: a, url: 'http://a', rol: x}", "did you mean 'role'"),
        ("[", "fleet.yaml"),
        (None, "No such file"),
    ],
)
async def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "fleet.yaml").write_text(text)
    with pytest.raises(DiscoveryError, match=says.replace("[", r"\[")):
        await found_by(config_of("{type: file, path: fleet.yaml}", tmp_path))


async def test_a_names_addresses_become_backends() -> None:
    found = await found_by(
        config_of("{type: dns, host: localhost, port: 8000, backend: {role: prefill, kv_transfer: nixl}}")
    )
    backend = found["localhost-127.0.0.1"]
    assert (backend.url, backend.role, backend.kv_transfer) == ("http://127.0.0.1:8000", "prefill", "nixl")


async def test_a_name_that_does_not_resolve_is_told() -> None:
    backends, faults = await discover_once(config_of("{type: dns, host: no-such-host.invalid, port: 1}"))
    assert backends == []
    assert [where for where, _ in faults] == ["regions.r.discovery[0]"]
    assert "does not resolve" in faults[0][1]


@dataclass
class Kubernetes:
    """The part of the API that is asked: EndpointSlices of one namespace, in pages of two."""

    slices: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    asked: list[web.Request] = field(default_factory=list)

    async def list(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        if request.headers.get("authorization") != "Bearer t0ken" or self.status != 200:
            return web.json_response({"kind": "Status"}, status=403 if self.status == 200 else self.status)
        wanted = request.query["labelSelector"]
        items = [s for s in self.slices if f"kubernetes.io/service-name={s['service']}" == wanted]
        start = int(request.query.get("continue", "0"))
        more = {"continue": str(start + 2)} if start + 2 < len(items) else {}
        return web.json_response({"metadata": more, "items": items[start : start + 2]})


def slice_of(service: str, *pods: tuple[str, str, bool | None], port: int = 8000) -> dict[str, Any]:
    endpoints = [
        {"addresses": [address], "conditions": {} if ready is None else {"ready": ready}, "targetRef": {"name": pod}}
        for pod, address, ready in pods
    ]
    ports = [{"name": "metrics", "port": 9}, {"name": "http", "port": port}]
    return {"service": service, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}


@asynccontextmanager
async def kubernetes(tmp_path: Path, api: Kubernetes) -> AsyncIterator[str]:
    (tmp_path / "token").write_text("t0ken\n")
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices", api.list)
    async with serving(app) as url:
        yield (
            f"{{type: kubernetes, service: engines, namespace: llm, port: http, api_url: '{url}', token_file: token, "
            "backend: {role: decode}}"
        )


async def test_ready_endpoints_of_all_pages_become_backends(tmp_path: Path) -> None:
    api = Kubernetes([
        slice_of("engines", ("pod-a", "10.0.0.1", True), ("pod-b", "10.0.0.2", False)),
        slice_of("other", ("pod-x", "10.0.0.9", True)),
        slice_of("engines", ("pod-c", "10.0.0.3", None), port=8001),
        slice_of("engines", ("pod-d", "10.0.0.4", True)),
    ])  # fmt: skip
    async with kubernetes(tmp_path, api) as source:
        found = await found_by(config_of(source, tmp_path))
    assert {name: backend.url for name, backend in found.items()} == {
        "pod-a": "http://10.0.0.1:8000",
        "pod-c": "http://10.0.0.3:8001",
        "pod-d": "http://10.0.0.4:8000",
    }
    assert all(backend.role == "decode" for backend in found.values())


async def test_a_refusal_of_the_api_names_the_right_it_needs(tmp_path: Path) -> None:
    async with kubernetes(tmp_path, Kubernetes(status=403)) as source:
        with pytest.raises(DiscoveryError, match="get and list on endpointslices"):
            await found_by(config_of(source, tmp_path))


async def test_the_fleet_follows_and_survives_an_outage_of_the_api(tmp_path: Path) -> None:
    api = Kubernetes([slice_of("engines", ("pod-a", "10.0.0.1", True))])
    async with kubernetes(tmp_path, api) as source:
        fleet = Fleet(config_of(source, tmp_path))
        discoverer = Discoverer(fleet)
        await discoverer.start()
        try:
            assert set(fleet.members) == {"pod-a"}
            kept = fleet.members["pod-a"]
            api.slices.append(slice_of("engines", ("pod-b", "10.0.0.2", True)))
            await until(lambda: set(fleet.members) == {"pod-a", "pod-b"})
            assert fleet.members["pod-a"] is kept, "what is known of a member stays"
            api.status = 500
            await until(discoverer.degraded)
            assert set(fleet.members) == {"pod-a", "pod-b"}
            api.status = 200
            api.slices.pop(0)
            await until(lambda: set(fleet.members) == {"pod-b"})
            assert discoverer.degraded() == []
        finally:
            await discoverer.stop()


async def test_a_reload_follows_the_new_sources(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"- {{name: {name}, url: 'http://h'}}")
    fleet = Fleet(config_of("{type: file, path: one.yaml}", tmp_path))
    discoverer = Discoverer(fleet)
    await discoverer.start()
    try:
        fleet.reconfigure(config_of("{type: file, path: two.yaml}", tmp_path))
        discoverer.reconfigure()
        await until(lambda: set(fleet.members) == {"two"})
    finally:
        await discoverer.stop()
        await asyncio.sleep(0)
