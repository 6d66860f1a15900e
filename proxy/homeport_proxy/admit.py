"""Who may come in: tenants by key, their limits, and what the rest of the way needs to know of them.

Keys are compared by hash: a key's SHA-256 is looked up under a digest keyed with a secret of this process, then
compared in constant time, so that neither a key nor its hash can be learnt from how long an answer takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from homeport_proxy.config import Tenant
from homeport_proxy.errors import invalid_api_key, rate_limited
from homeport_proxy.exchange import ANYBODY, Caller, Exchange
from homeport_proxy.limits import Limits, Refusal, TenantLimit

log = logging.getLogger(__name__)

_NO_LIMITS: AbstractAsyncContextManager[None] = nullcontext()
_HASH_LINE = re.compile(r"^(?:sha256:)?([0-9a-fA-F]{64})(?:\s.*)?$")


class KeysFileError(Exception):
    """A file of key hashes that cannot be used; the text names the line and the remedy."""


def hash_of(key: str) -> bytes:
    """A key's SHA-256, as in a keys file."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_hashes(path: Path) -> list[bytes]:
    """The hashes of a keys file: one ``sha256:HEX`` a line, a label may follow; ``#`` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysFileError(f"{path}: cannot be read: {error}") from None
    hashes = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _HASH_LINE.match(text)
        if match is None:
            raise KeysFileError(f"{path}:{number}: is no hash; write sha256: and 64 hexadecimal digits, never the key")
        hashes.append(bytes.fromhex(match.group(1)))
    return hashes


def key_in(headers: Mapping[str, str]) -> str | None:
    """The key a request carries: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key", "").strip() or None


class KeyRing:
    """Keys to owners. Unknown keys cost as much time as known ones."""

    def __init__(self, hashes: Mapping[bytes, str] | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._owners = {self._mark(digest): (digest, owner) for digest, owner in (hashes or {}).items()}

    def owner(self, key: str | None) -> str | None:
        """Whose key this is; None for nobody's."""
        digest = hash_of(key or "")
        known, owner = self._owners.get(self._mark(digest), (bytes(32), None))
        return owner if hmac.compare_digest(digest, known) and key else None

    def _mark(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _KeysFile:
    """A keys file as last read."""

    changed_ns: int
    hashes: tuple[bytes, ...]


class Admission:
    """The tenants. With none configured everybody may come in, as nobody in particular."""

    def __init__(self, tenants: Sequence[Tenant], limits: Limits) -> None:
        self._limits = limits
        self._files: dict[Path, _KeysFile] = {}
        self._tenants: dict[str, Tenant] = {}
        self._ring = KeyRing()
        self.faults: list[str] = []
        """What is wrong with keys files now, one line each; the last good hashes stay in force."""
        self.reconfigure(tenants)

    @property
    def open(self) -> bool:
        """True without tenants: no key is asked for."""
        return not self._tenants

    def reconfigure(self, tenants: Sequence[Tenant]) -> None:
        """Take a reloaded file's tenants; requests under way keep what they were admitted with."""
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._read_keys()

    def reload_keys(self) -> bool:
        """Read keys files again that changed; True when one did."""
        changed = any(_changed_ns(path) != read.changed_ns for path, read in self._files.items())
        if changed or self.faults:
            self._read_keys()
        return changed

    def tenant(self, name: str) -> Tenant | None:
        """The tenant's configuration."""
        return self._tenants.get(name)

    def names(self) -> list[str]:
        """Every tenant's name."""
        return list(self._tenants)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sends this request. Raises ProxyError 401 when tenants are configured and the key is nobody's."""
        if not self._tenants:
            return ANYBODY
        name = self._ring.owner(key_in(headers))
        if name is None:
            raise invalid_api_key()
        tenant = self._tenants[name]
        return Caller(name=name, weight=tenant.weight, cache_salt=cache_salt(tenant))

    def enter(self, exchange: Exchange) -> AbstractAsyncContextManager[None]:
        """Hold a place within the caller's limits for the whole request. Raises ProxyError 429, at once."""
        tenant = self._tenants.get(exchange.tenant)
        return _NO_LIMITS if tenant is None else self._hold(exchange, tenant)

    @asynccontextmanager
    async def _hold(self, exchange: Exchange, tenant: Tenant) -> AsyncIterator[None]:
        limit = TenantLimit(tenant.max_concurrent, tenant.tokens_per_minute)
        taken = exchange.prompt_tokens_estimate
        take = asyncio.ensure_future(self._limits.take(tenant.name, taken, limit))
        try:
            refusal = await asyncio.shield(take)
        except asyncio.CancelledError:
            take.add_done_callback(lambda done: self._give_back(done, tenant.name, -taken, limit))
            raise
        if refusal is not None:
            raise rate_limited(f"{tenant.name}: {refusal.why}; try again later", refusal.retry_after_s)
        try:
            yield
        finally:
            self._limits.give(tenant.name, _used(exchange) - taken, limit)

    def _give_back(self, take: asyncio.Future[Refusal | None], tenant: str, tokens: int, limit: TenantLimit) -> None:
        if not take.cancelled() and take.exception() is None and take.result() is None:
            self._limits.give(tenant, tokens, limit)

    def _read_keys(self) -> None:
        self.faults = []
        hashes: dict[bytes, str] = {}
        files: dict[Path, _KeysFile] = {}
        for tenant in self._tenants.values():
            own: list[bytes] = []
            if tenant.key_env is not None and (key := os.environ.get(tenant.key_env, "").strip()):
                own.append(hash_of(key))
            if tenant.keys_file is not None:
                files[tenant.keys_file] = self._read_file(tenant.keys_file)
                own += files[tenant.keys_file].hashes
            for digest in own:
                if hashes.setdefault(digest, tenant.name) != tenant.name:
                    self.faults.append(f"a key belongs to {hashes[digest]} and {tenant.name}; it counts for the first")
        self._files = files
        self._ring = KeyRing(hashes)
        for fault in self.faults:
            log.error("keys: %s", fault)

    def _read_file(self, path: Path) -> _KeysFile:
        changed_ns = _changed_ns(path)
        try:
            return _KeysFile(changed_ns, tuple(read_hashes(path)))
        except KeysFileError as error:
            self.faults.append(str(error))
            before = self._files.get(path)
            return _KeysFile(changed_ns, before.hashes if before else ())


def cache_salt(tenant: Tenant) -> str | None:
    """What keeps a tenant's cache apart: the same on every proxy, so that it survives restarts; None: shared."""
    if tenant.cache_scope == "fleet":
        return None
    return hashlib.blake2b(tenant.name.encode(), person=b"homeport-salt", digest_size=16).hexdigest()


def _used(exchange: Exchange) -> int:
    """Tokens to charge: as reported; what was estimated when nothing was; nothing when no engine answered."""
    usage = exchange.usage
    if usage.prompt_tokens is None and usage.output_tokens is None:
        return exchange.prompt_tokens_estimate if exchange.ok or exchange.first_token_s is not None else 0
    prompt = exchange.prompt_tokens_estimate if usage.prompt_tokens is None else usage.prompt_tokens
    return prompt + (usage.output_tokens or 0)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1
