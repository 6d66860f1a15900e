"""Backends that come and go: a watched file, a name's addresses, a Kubernetes service's EndpointSlices.

Each source gives the whole list every time it is asked. When it fails, what it found last stays, and the failure is
told; a source never found anything yet simply has none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import yaml
from pydantic import ValidationError

from homeport_proxy.config import (
    Backend,
    BackendSettings,
    Config,
    Discovery,
    DnsDiscovery,
    KubernetesDiscovery,
    StaticFileDiscovery,
)
from homeport_proxy.config_faults import validation_faults
from homeport_proxy.fleet import Fleet

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
MAX_PAGES = 50


class DiscoveryError(Exception):
    """A source that could not be asked; the text says why."""


async def find(source: Discovery, defaults: BackendSettings) -> list[Backend]:
    """What a source lists now, with the region's defaults filled in. Raises :class:`DiscoveryError`."""
    if isinstance(source, StaticFileDiscovery):
        return [backend.with_defaults(defaults) for backend in await asyncio.to_thread(_in_file, source.path)]
    found = await (_in_dns(source) if isinstance(source, DnsDiscovery) else _in_kubernetes(source))
    return [
        Backend.model_validate({"name": name, "url": url, **source.backend.under(None)}).with_defaults(defaults)
        for name, url in sorted(found.items())
    ]


async def discover_once(config: Config) -> tuple[list[tuple[str, Backend]], list[tuple[str, str]]]:
    """Ask every source once: the backends by region, and (path, fault) of sources that failed."""
    found: list[tuple[str, Backend]] = []
    faults: list[tuple[str, str]] = []
    for name, region in config.regions.items():
        for index, source in enumerate(region.discovery):
            try:
                found += [(name, backend) for backend in await find(source, region.defaults)]
            except DiscoveryError as error:
                faults.append((f"regions.{name}.discovery[{index}]", str(error)))
    return found, faults


class Discoverer:
    """Asks every source at its interval and tells the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: dict[tuple[str, int], tuple[Discovery, asyncio.Task[None]]] = {}
        self.faults: dict[tuple[str, int], str] = {}

    async def start(self) -> None:
        """Ask every source once, then go on."""
        config = self._fleet.config
        sources = [(name, i) for name, region in config.regions.items() for i in range(len(region.discovery))]
        await asyncio.gather(*(self._ask(name, index) for name, index in sources))
        self.reconfigure()

    def reconfigure(self) -> None:
        """Follow the fleet's configuration: new sources are asked at once, gone ones no more."""
        config = self._fleet.config
        wanted = {
            (name, index): source
            for name, region in config.regions.items()
            for index, source in enumerate(region.discovery)
        }
        for key, (source, task) in list(self._tasks.items()):
            if wanted.get(key) != source:
                task.cancel()
                del self._tasks[key]
                self.faults.pop(key, None)
        for key, source in wanted.items():
            if key not in self._tasks:
                self._tasks[key] = (source, asyncio.create_task(self._follow(*key, source), name=f"discovery {key}"))

    async def stop(self) -> None:
        """Ask no more."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def degraded(self) -> list[str]:
        """Sources that fail, one sentence each."""
        return [f"discovery of {region}: {fault}" for (region, _), fault in self.faults.items()]

    async def _follow(self, region: str, index: int, source: Discovery) -> None:
        while True:
            await self._ask(region, index)
            await asyncio.sleep(source.interval_s or self._fleet.config.health.interval_s)

    async def _ask(self, region: str, index: int) -> None:
        where = self._fleet.config.regions[region]
        try:
            found = await find(where.discovery[index], where.defaults)
        except DiscoveryError as error:
            if self.faults.get((region, index)) != str(error):
                log.warning("discovery of %s: %s", region, error)
            self.faults[region, index] = str(error)
            return
        except Exception as error:  # one source at fault inside must not end the watch over it
            log.exception("discovery of %s failed inside the proxy", region)
            self.faults[region, index] = f"internal: {type(error).__name__}"
            return
        self.faults.pop((region, index), None)
        self._fleet.discovered(region, index, found)


# a file


def _in_file(path: Path) -> list[Backend]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise DiscoveryError(f"{path}: {str(error).splitlines()[0]}") from None
    listed = data.get("backends") if isinstance(data, dict) else data
    if not isinstance(listed, list):
        raise DiscoveryError(f"{path}: must be a list of backends, or have one under `backends`")
    backends = []
    for index, entry in enumerate(listed):
        try:
            backends.append(Backend.model_validate(entry, context={"base": path.parent}))
        except ValidationError as error:
            faults = "; ".join(validation_faults(error, Backend))
            raise DiscoveryError(f"{path}: backends[{index}].{faults}") from None
    return backends


# a name


async def _in_dns(source: DnsDiscovery) -> dict[str, str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            records = await loop.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise DiscoveryError(f"{source.host} does not resolve: {str(error) or 'no answer in time'}") from None
    label = source.host.partition(".")[0] if not _is_address(source.host) else "host"
    addresses = sorted({str(record[4][0]) for record in records})
    return {_name(f"{label}-{address}"): _url(source.scheme, address, source.port) for address in addresses}


def _is_address(host: str) -> bool:
    return bool(re.fullmatch(r"[0-9.]+", host)) or ":" in host


def _url(scheme: str, address: str, port: int) -> str:
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"


def _name(text: str) -> str:
    """A legal backend name out of a pod's or address's."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).strip("-._")[-63:].lstrip("-._")


# Kubernetes


async def _in_kubernetes(source: KubernetesDiscovery) -> dict[str, str]:
    base, namespace = _api_of(source), source.namespace or _namespace()
    path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices"
    params = {"labelSelector": f"kubernetes.io/service-name={source.service}", "limit": "500"}
    timeout, tls = aiohttp.ClientTimeout(total=TIMEOUT_S), _authority(source)
    found: dict[str, str] = {}
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=_token(source)) as session:
            for _ in range(MAX_PAGES):
                async with session.get(base + path, params=params, ssl=tls, allow_redirects=False) as answer:
                    if answer.status != 200:
                        raise DiscoveryError(
                            f"the Kubernetes API answers {answer.status} for EndpointSlices of {namespace}; the "
                            "service account needs get and list on endpointslices.discovery.k8s.io"
                        )
                    document = await answer.json(content_type=None)
                for item in document.get("items") or ():
                    found.update(_ready(item, source))
                following = (document.get("metadata") or {}).get("continue")
                if not following:
                    return found
                params["continue"] = following
    except (
        aiohttp.ClientError,
        OSError,
        TimeoutError,
        ValueError,
        AttributeError,
        TypeError,
        KeyError,
        RecursionError,
    ) as error:
        raise DiscoveryError(f"the Kubernetes API failed: {type(error).__name__}: {error}") from None
    raise DiscoveryError(f"the Kubernetes API gave more than {MAX_PAGES} pages")


def _ready(item: dict[str, Any], source: KubernetesDiscovery) -> Iterator[tuple[str, str]]:
    """Names and addresses of a slice's ready endpoints (a missing ``ready`` means ready)."""
    port = _port_of(item.get("ports") or [], source.port)
    if port is None or item.get("addressType") == "FQDN":
        return
    for endpoint in item.get("endpoints") or ():
        if (endpoint.get("conditions") or {}).get("ready") is False:
            continue
        address = str(endpoint["addresses"][0])
        pod = (endpoint.get("targetRef") or {}).get("name")
        yield _name(pod or f"{source.service}-{address}"), _url(source.scheme, address, port)


def _port_of(ports: list[dict[str, Any]], wanted: str | int | None) -> int | None:
    if isinstance(wanted, int) or (isinstance(wanted, str) and wanted.isdigit()):
        return int(wanted)
    for port in ports:
        if wanted is None or port.get("name") == wanted:
            return int(port["port"]) if port.get("port") else None
    return None


def _api_of(source: KubernetesDiscovery) -> str:
    if source.api_url is not None:
        return source.api_url
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise DiscoveryError("not inside a Kubernetes cluster; give api_url, token_file and ca_file")
    return _url("https", host, int(port))


def _namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return "default"


def _token(source: KubernetesDiscovery) -> dict[str, str]:
    """Read anew each time: Kubernetes renews the token's file."""
    try:
        return {"authorization": f"Bearer {source.token_file.read_text(encoding='utf-8').strip()}"}
    except OSError as error:
        raise DiscoveryError(f"token_file {source.token_file}: {error.strerror}") from None


def _authority(source: KubernetesDiscovery) -> ssl.SSLContext | bool:
    file = source.ca_file or SERVICE_ACCOUNT / "ca.crt"
    if not file.exists():
        return True
    try:
        return ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError) as error:
        raise DiscoveryError(f"ca_file {file}: {error}") from None
