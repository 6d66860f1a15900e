"""The proxy's configuration file: its shape, its defaults, and one clear line for everything wrong with it."""

from __future__ import annotations

import fnmatch
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from homeport.profiles import PROFILES
from homeport_proxy.config_faults import StrictLoader, expand, validation_faults, yaml_fault

SESSION_HEADERS = (
    "x-session-affinity",
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-opencode-session",
    "x-grok-conv-id",
    "x-affinity",
    "x-smg-routing-key",
    "x-dynamo-session-id",
)
"""Request headers that name a session, in the order they are believed."""

DENIED_PATHS = ("load_lora_adapter", "unload_lora_adapter", "*/render")
"""Paths below ``/v1/`` that are never passed on: they change the engine or show its templates."""


class ConfigError(Exception):
    """A configuration that cannot be used; ``errors`` holds one line per fault: path, what is wrong, the remedy."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


def _beside_the_file(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("base")
    path = path.expanduser()
    return path if base is None else Path(base) / path


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST[:PORT] or https://HOST[:PORT]")
    _ = parts.port  # raises ValueError for a port that is none
    if parts.username or parts.password:
        raise ValueError("must not hold credentials; give them with key_env or key_file")
    if parts.query or parts.fragment:
        raise ValueError("must not have a query or fragment")
    return url.rstrip("/")


def _host_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is no HOST:PORT, such as 127.0.0.1:8080")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 address in brackets, such as [::1]:8080")
    return host or "0.0.0.0", int(port)


def _profile(name: str) -> str:
    acting = sorted(one.name for one in PROFILES.values() if one.proxy_rules)
    if name not in acting:
        raise ValueError(
            f"{name!r} is no harness whose prompts the proxy can keep still; those are {', '.join(acting)}"
        )
    return name


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


FilePath: TypeAlias = Annotated[Path, AfterValidator(_beside_the_file)]
"""A path; a relative one counts from the folder of the configuration file."""
Url: TypeAlias = Annotated[str, AfterValidator(_http_url)]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Role: TypeAlias = Literal["prefill", "decode", "mixed"]
Profile: TypeAlias = Annotated[str, AfterValidator(_profile)]
Policy: TypeAlias = Literal["cost", "session", "prefix", "least-tokens", "round-robin"]


_T = TypeVar("_T", bound=BaseModel)
_SECRET_HEADER = re.compile(r"(?i)auth|key|token|secret|cookie|password")


class Section(BaseModel):
    """A part of the file: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Keyed(Section):
    """Something with a secret, named by environment variable or file and never written in the configuration."""

    key_env: str | None = None
    key_file: FilePath | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Keyed:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("give key_env or key_file, not both")
        return self

    def key(self) -> str | None:
        """The secret, read now; None when none is configured. Raises :class:`ConfigError` when it is missing."""
        if self.key_env is not None:
            value = os.environ.get(self.key_env, "").strip()
            if not value:
                raise ConfigError([f"key_env: environment variable {self.key_env} is not set; export it"])
            return value
        if self.key_file is not None:
            try:
                value = self.key_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError([f"key_file: cannot read {self.key_file}: {_why(error)}"]) from None
            if not value:
                raise ConfigError([f"key_file: {self.key_file} is empty; put the key in it"])
            return value
        return None


class ServerTls(Section):
    """Certificate chain and private key (PEM files) of the proxy's own listener."""

    cert: FilePath
    key: FilePath


class ClientTls(Section):
    """How TLS towards an engine or peer is checked: own authority, client certificate."""

    ca: FilePath | None = None
    cert: FilePath | None = None
    key: FilePath | None = None
    verify: bool = True


def _field_defaults(model: type[_T]) -> dict[str, Any]:
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
        if not field.is_required()
    }


class Listen(Section):
    """Where the proxy listens: ``HOST:PORT`` (``:PORT`` means every address), with or without TLS."""

    address: str = "127.0.0.1:8080"
    tls: ServerTls | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        return {"address": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _address(self) -> Listen:
        _ = self.host, self.port
        return self

    @property
    def host(self) -> str:
        """The address to bind, ``0.0.0.0`` for every one; IPv6 without brackets."""
        return _host_port(self.address)[0]

    @property
    def port(self) -> int:
        """The TCP port, 0 for any free one."""
        return _host_port(self.address)[1]

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)


class KvEventSource(Section):
    """ZMQ endpoints of an engine's KV events: live publications and their replay."""

    pub: str
    replay: str | None = None


class BackendSettings(Keyed):
    """What a backend may inherit from its region's ``defaults``."""

    role: Role = "mixed"
    engine: Literal["vllm", "sglang", "openai"] = "vllm"
    headers: dict[str, str] = Field(default_factory=dict)
    tls: ClientTls | None = None
    models: list[str] | None = None
    kv_transfer: Literal["none", "nixl", "nixl-push", "mooncake", "bootstrap"] = "none"
    kv_store: Literal["none", "mooncake", "lmcache", "hicache", "shared-folder"] = "none"
    kv_lease_s: PositiveFloat | None = None
    kv_readback: bool = False
    kv_events: Literal["none", "auto"] | KvEventSource = "auto"
    data_parallel: Literal["auto"] | PositiveInt = "auto"
    spec: str | dict[str, Any] | None = None
    capacity: PositiveFloat | None = None
    pool: Name = "default"
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    max_model_len: PositiveInt | None = None

    def under(self, defaults: BackendSettings | None) -> dict[str, Any]:
        """The values set here over those set in ``defaults``; headers are merged name by name."""
        if defaults is None:
            return {name: getattr(self, name) for name in self.model_fields_set}
        own_key = bool({"key_env", "key_file"} & self.model_fields_set)
        inherited = {
            name: getattr(defaults, name)
            for name in defaults.model_fields_set
            if not (own_key and name in ("key_env", "key_file"))
        }
        own = {name: getattr(self, name) for name in self.model_fields_set}
        return {**inherited, **own, "headers": {**defaults.headers, **self.headers}}


class Backend(BackendSettings):
    """One engine (or one data-parallel group of them behind one address)."""

    name: Name
    url: Url

    def with_defaults(self, defaults: BackendSettings | None) -> Backend:
        """This backend with the region's defaults filled in where it says nothing itself."""
        return Backend.model_construct(**{**_field_defaults(Backend), **self.under(defaults)})


class StaticFileDiscovery(Section):
    """Backends listed in a YAML or JSON file (a list, or ``backends: [...]``), read again at the interval (without
    one: the health checks'), as every source is."""

    type: Literal["file"]
    path: FilePath
    interval_s: PositiveFloat | None = None


class DnsDiscovery(Section):
    """One backend per address a name resolves to (a headless service, round-robin records)."""

    type: Literal["dns"]
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    scheme: Literal["http", "https"] = "http"
    interval_s: PositiveFloat | None = None
    backend: BackendSettings = BackendSettings()


class KubernetesDiscovery(Section):
    """One backend per ready endpoint of a Kubernetes service, from its EndpointSlices.

    Inside a cluster the API address, namespace, token and authority are those of the pod's service account.
    """

    type: Literal["kubernetes"]
    service: str
    namespace: str | None = None
    port: str | int | None = None
    scheme: Literal["http", "https"] = "http"
    api_url: Url | None = None
    token_file: FilePath = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    ca_file: FilePath | None = None
    interval_s: PositiveFloat | None = None
    backend: BackendSettings = BackendSettings()


Discovery: TypeAlias = Annotated[StaticFileDiscovery | DnsDiscovery | KubernetesDiscovery, Field(discriminator="type")]


class Region(Keyed):
    """A place with backends of its own, or one reached through its own proxy (``proxy``: its address)."""

    weight: PositiveFloat = 1.0
    defaults: BackendSettings = BackendSettings()
    backends: list[Backend] = Field(default_factory=list)
    discovery: list[Discovery] = Field(default_factory=list)
    proxy: Url | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    tls: ClientTls | None = None
    rtt_ms: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _backends_or_proxy(self) -> Region:
        if self.proxy is not None and (self.backends or self.discovery):
            raise ValueError("has `proxy` and backends; a region is reached through its proxy or directly, not both")
        if self.proxy is None and not (self.backends or self.discovery):
            raise ValueError("has no backends; list them under `backends`, or give `discovery` or `proxy`")
        merged = [backend.with_defaults(self.defaults) for backend in self.backends]
        object.__setattr__(self, "backends", merged)
        return self

    @property
    def kind(self) -> Literal["local", "peer"]:
        """``peer`` when it is reached through its own proxy."""
        return "local" if self.proxy is None else "peer"


class Model(Section):
    """A model clients may ask for; ``aliases`` (wildcards allowed) are other names for it."""

    name: Annotated[str, StringConstraints(min_length=1)]
    aliases: list[str] = Field(default_factory=list)
    regions: list[str] | None = None


class Affinity(Section):
    """How sessions are told apart and how long an idle one is remembered."""

    headers: list[Annotated[str, StringConstraints(to_lower=True, min_length=1)]] = Field(
        default_factory=lambda: list(SESSION_HEADERS)
    )
    idle_ttl_s: PositiveFloat = 3600.0
    max_sessions: PositiveInt = 100_000


class Routing(Section):
    """Which policy decides, which others only decide on paper, and how uneven in-flight tokens may get.

    ``late_binding``: hold a request until its engine is nearly free. ``hold_new_sessions_above``: while live context
    exceeds this multiple of all KV capacity, new sessions wait (null: never). ``slice_s``: a prefill predicted to take
    more than half as long again is sent in parts of about this long, so that others come in between (0: never).
    ``drain_idle_s``: a session leaves a draining backend once idle this long. ``index_mb``: memory of the prefix index.
    """

    policy: Policy = "cost"
    load_bound: Annotated[float, Field(ge=1.0)] = 1.25
    shadow: list[Policy] = Field(default_factory=list)
    late_binding: bool = True
    hold_new_sessions_above: PositiveFloat | None = None
    slice_s: Annotated[float, Field(ge=0)] = 1.0
    drain_idle_s: PositiveFloat = 60.0
    index_mb: PositiveInt = 256


class Disaggregation(Section):
    """When a prompt is prefilled on an engine of its own; 1 means whenever anything is uncached."""

    min_uncached_tokens: Annotated[int, Field(ge=0)] = 256


class Health(Section):
    """Active probes: their period, their patience, and the failures in a row that mean down.

    ``slow_start_s``: how long a recovered backend takes to get its full share. ``panic_threshold``: when fewer than
    this share of a kind would be left, open breakers are ignored. ``max_cool_s``: the longest ``retry-after`` heeded.
    """

    interval_s: PositiveFloat = 1.0
    timeout_s: PositiveFloat = 5.0
    fail_after: PositiveInt = 2
    slow_start_s: PositiveFloat = 10.0
    panic_threshold: Annotated[float, Field(ge=0, le=1)] = 0.2
    max_cool_s: PositiveFloat = 300.0


class Price(Section):
    """A model's rates in US dollars per million tokens; cached ones cost as much as any input when left out."""

    input: Annotated[Decimal, Field(ge=0)]
    output: Annotated[Decimal, Field(ge=0)]
    cache_read: Annotated[Decimal, Field(ge=0)] | None = None
    cache_write: Annotated[Decimal, Field(ge=0)] | None = None


class Tenant(Section):
    """Who may use the proxy, with which key, how much at once, and where."""

    name: Name
    key_env: str | None = None
    keys_file: FilePath | None = None
    max_concurrent: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    weight: PositiveFloat = 1.0
    cache_scope: Literal["tenant", "fleet"] = "tenant"
    prices: dict[str, Price] | None = None
    regions: list[str] | None = None

    @model_validator(mode="after")
    def _has_a_key(self) -> Tenant:
        if self.key_env is None and self.keys_file is None:
            raise ValueError("has no key; give key_env (an environment variable) or keys_file (a file of hashes)")
        return self


class Admin(Keyed):
    """The key of the admin API and dashboard; without one only this machine may use them."""


class State(Section):
    """Where several proxies share pins, drains, limits and load; without Redis each keeps its own."""

    redis: str | None = None
    prefix: str = "homeport"

    @model_validator(mode="after")
    def _redis_url(self) -> State:
        if self.redis is not None and urlsplit(self.redis).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("redis must be redis://HOST:PORT/DB, rediss://... or unix://PATH")
        return self


class Record(Section):
    """Requests written as JSON lines for `homeport explain`; without ``text`` only keyed digests of long strings."""

    file: FilePath | None = None
    text: bool = False


class LedgerFile(Section):
    """The SQLite file of the ledger (none: kept in memory until the proxy stops), and prices by model name or pattern
    for tenants without their own."""

    path: FilePath | None = None
    prices: dict[str, Price] | None = None


class Timeouts(Section):
    """Patience in seconds: to connect, to the first token, between bytes, and for streams when stopping."""

    connect_s: PositiveFloat = 5.0
    first_token_s: PositiveFloat = 600.0
    idle_s: PositiveFloat = 120.0
    drain_s: Annotated[float, Field(ge=0)] = 600.0


class Limits(Section):
    """Bounds on one request's body (bytes) and on requests waiting in the proxy."""

    body_bytes: PositiveInt = 64 * 1024 * 1024
    queue: Annotated[int, Field(ge=0)] = 1024


class PassThrough(Section):
    """Other paths under ``/v1/``: these patterns are refused, the rest goes to an engine unchanged."""

    deny: tuple[str, ...] = DENIED_PATHS


class Log(Section):
    """How the proxy writes its log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"


class Tracing(Section):
    """OpenTelemetry spans per request, through whatever exporter the process has configured."""

    enabled: bool = False


class Decisions(Section):
    """The decision log: a file of JSON lines for ``homeport replay --decisions``; none: not written."""

    file: FilePath | None = None


class Config(Section):
    """The whole file. ``load`` gives one; every section may be left out."""

    listen: Listen = Listen()
    region: str = "local"
    models: list[Model] = Field(default_factory=list)
    regions: Annotated[dict[Name, Region], Field(min_length=1)]
    affinity: Affinity = Affinity()
    profiles: list[Profile] = Field(default_factory=list)
    """Harnesses whose volatile text is left out of system prompts."""
    routing: Routing = Routing()
    disaggregation: Disaggregation = Disaggregation()
    health: Health = Health()
    tenants: list[Tenant] = Field(default_factory=list)
    admin: Admin = Admin()
    state: State = State()
    record: Record = Record()
    ledger: LedgerFile = LedgerFile()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    passthrough: PassThrough = PassThrough()
    log: Log = Log()
    tracing: Tracing = Tracing()
    decisions: Decisions = Decisions()

    @property
    def here(self) -> Region:
        """The region this proxy stands in."""
        return self.regions[self.region]

    @property
    def backends(self) -> list[tuple[str, Backend]]:
        """Every backend written in the file with its region's name."""
        return [(name, backend) for name, region in self.regions.items() for backend in region.backends]

    def model(self, asked: str) -> Model | None:
        """The model a client's name stands for: by name, then by alias, then by the longest matching wildcard.

        With no ``models`` in the file every name stands for itself.
        """
        if not self.models:
            return Model(name=asked)
        for model in self.models:
            if model.name == asked:
                return model
        matching = [
            (alias != asked, -len(alias), index)
            for index, model in enumerate(self.models)
            for alias in model.aliases
            if alias == asked or fnmatch.fnmatchcase(asked, alias)
        ]
        return self.models[min(matching)[2]] if matching else None

    def refuses_to_listen(self, insecure: bool = False) -> str | None:
        """Why this configuration must not be served: an open proxy beyond this machine; None when it may."""
        if self.tenants or self.listen.loopback or insecure:
            return None
        return (
            f"listen: {self.listen.address} can be reached from other machines and no tenants are configured, so "
            "anyone could use the engines; add tenants, listen on 127.0.0.1, or give --insecure"
        )


def load(path: str | Path, env: Mapping[str, str] | None = None) -> Config:
    """Read and validate a configuration file; raises :class:`ConfigError` with every fault found."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {_why(error)}; give an existing file with -c"]) from None
    return parse(text, base=path.parent, env=env)


def parse(text: str, *, base: Path | None = None, env: Mapping[str, str] | None = None) -> Config:
    """Validate a configuration given as YAML text; ``base`` is the folder relative paths count from."""
    try:
        data = yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError([yaml_fault(error)]) from None
    except RecursionError:
        raise ConfigError(["not YAML of ours: it is nested too deeply"]) from None
    if not isinstance(data, dict):
        raise ConfigError(["the file must be a mapping of sections; at least `regions` is needed"])
    errors: list[str] = []
    data = expand(data, os.environ if env is None else env, (), errors)
    regions = data.get("regions")
    if "region" not in data and isinstance(regions, dict) and len(regions) == 1:
        data["region"] = next(iter(regions))
    try:
        config = Config.model_validate(data, context={"base": base})
    except ValidationError as error:
        raise ConfigError(errors + validation_faults(error, Config, errors)) from None
    errors += _cross_checks(config)
    if errors:
        raise ConfigError(errors)
    return config


def missing_secrets(config: Config) -> list[str]:
    """One line per key that is named in the file but cannot be read."""
    faults: list[str] = []
    holders: list[tuple[str, Keyed]] = [("admin", config.admin)]
    for name, region in config.regions.items():
        holders.append((f"regions.{name}", region))
        holders += [(f"regions.{name}.backends[{i}]", backend) for i, backend in enumerate(region.backends)]
    for where, holder in holders:
        try:
            holder.key()
        except ConfigError as error:
            faults += [f"{where}.{line}" for line in error.errors]
    for i, tenant in enumerate(config.tenants):
        if tenant.key_env is not None and not os.environ.get(tenant.key_env, "").strip():
            faults.append(f"tenants[{i}].key_env: environment variable {tenant.key_env} is not set; export it")
        if tenant.keys_file is not None and not os.access(tenant.keys_file, os.R_OK):
            faults.append(f"tenants[{i}].keys_file: cannot read {tenant.keys_file}; create it or fix its mode")
    return faults


def dump(config: Config) -> dict[str, Any]:
    """The effective configuration as plain values, defaults filled in and no secret in it."""
    data = config.model_dump(mode="json")
    if config.state.redis is not None:
        data["state"]["redis"] = without_password(config.state.redis)
    for region in data["regions"].values():
        for holder in (region, region["defaults"], *region["backends"]):
            holder["headers"] = {
                name: "***" if _SECRET_HEADER.search(name) else value for name, value in holder["headers"].items()
            }
    return data


def without_password(url: str) -> str:
    """A URL as it may be shown: the password replaced."""
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1:***@", url)


def is_loopback(host: str) -> bool:
    """Whether a host (name, IPv4 or IPv6, without brackets) is this machine's loopback."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _cross_checks(config: Config) -> list[str]:
    """Faults that need more than one section to see."""
    faults: list[str] = []
    if config.region not in config.regions:
        faults.append(
            f"region: {config.region!r} is none of the regions ({', '.join(config.regions)}); name one of them"
        )
    elif config.here.kind == "peer":
        faults.append(f"region: {config.region!r} is reached through a proxy; name the region this proxy stands in")
    faults += _twice("backend", ((f"regions.{r}.backends", b.name) for r, b in config.backends))
    faults += _twice("tenant", (("tenants", tenant.name) for tenant in config.tenants))
    faults += _twice("model", (("models", model.name) for model in config.models))
    holders: list[tuple[str, Model | Tenant]] = [(f"models[{i}]", model) for i, model in enumerate(config.models)]
    holders += [(f"tenants[{i}]", tenant) for i, tenant in enumerate(config.tenants)]
    for where, holder in holders:
        for region in holder.regions or ():
            if region not in config.regions:
                faults.append(f"{where}.regions: {region!r} is none of the regions ({', '.join(config.regions)})")
        if holder.regions == []:
            faults.append(f"{where}.regions: is empty, so nothing could be served; leave it out or name regions")
    return faults


def _twice(what: str, names: Iterator[tuple[str, str]]) -> list[str]:
    seen: set[str] = set()
    faults: list[str] = []
    for where, name in names:
        if name in seen:
            faults.append(f"{where}: {what} name {name!r} stands twice; names are unique over the whole file")
        seen.add(name)
    return faults
