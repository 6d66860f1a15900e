"""Tools of several MCP servers in one order that holds: whoever answers first, whoever is late, whoever reconnects.

Works on the official ``mcp`` client (``ClientSession`` and ``Client``) and on anything with its ``list_tools``. The
specification asks servers for a deterministic order, but gives clients no guarantee over pages and restarts.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol, cast, overload

import anyio

from homeport import canonical
from homeport.failures import failed
from homeport.fingerprint import JsonValue
from homeport.mcp_names import register_names
from homeport.session import current

MAX_PAGES = 1_000
_MAX_REMEMBERED = 1_024
_NAME_LIMIT = 64


class McpSession(Protocol):
    """What is needed of a client session: ``list_tools`` with a cursor, in either of the official forms."""

    @property
    def list_tools(self) -> Callable[..., Awaitable[object]]: ...


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool of one server. ``model_name`` is what the model calls it by: ``mcp__server__tool``, in the characters
    and the length that the APIs allow."""

    server: str
    name: str
    description: str = ""
    input_schema: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """Unique over the servers of a list."""
        wanted = f"mcp__{self.server}__{self.name}"
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", wanted)
        # underscores at the seam would let two pairs have one name
        clear = "__" not in self.server and self.server == self.server.strip("_")
        if plain == wanted and clear and len(plain) <= _NAME_LIMIT:
            return plain
        digest = sha256(f"{self.server}\0{self.name}".encode()).hexdigest()[:8]
        return f"{plain[: _NAME_LIMIT - 9]}_{digest}"

    def chat(self) -> dict[str, JsonValue]:
        """As a tool of Chat Completions."""
        return {
            "type": "function",
            "function": {"name": self.model_name, "description": self.description, "parameters": self._schema()},
        }

    def responses(self) -> dict[str, JsonValue]:
        """As a tool of Responses. Not strict: servers' schemas seldom meet what strict mode asks."""
        return {
            "type": "function",
            "name": self.model_name,
            "description": self.description,
            "parameters": self._schema(),
            "strict": False,
        }

    def messages(self) -> dict[str, JsonValue]:
        """As a tool of Anthropic's Messages."""
        return {"name": self.model_name, "description": self.description, "input_schema": self._schema()}

    def _schema(self) -> JsonValue:
        return canonical.schema({"type": "object", "properties": {}, **self.input_schema})


class ToolList(Sequence[McpTool]):
    """Tools in their frozen order. ``missing``: servers that have not answered; those of them that were known before
    keep their tools in the list. ``held``: model names of tools that wait for a free moment."""

    def __init__(self, tools: Iterable[McpTool] = (), missing: Iterable[str] = (), held: Iterable[str] = ()) -> None:
        self._tools = tuple(tools)
        self.missing = tuple(missing)
        self.held = tuple(held)
        self._by_name = {tool.model_name: tool for tool in self._tools}

    @overload
    def __getitem__(self, index: int) -> McpTool: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[McpTool]: ...

    def __getitem__(self, index: int | slice) -> McpTool | Sequence[McpTool]:
        return self._tools[index]

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[McpTool]:
        return iter(self._tools)

    def origin(self, model_name: str) -> tuple[str, str]:
        """(server, tool) for a name the model called. Raises KeyError for one that is not in the list."""
        tool = self._by_name[model_name]
        return tool.server, tool.name

    def chat(self) -> list[dict[str, JsonValue]]:
        """The list for ``tools=`` of Chat Completions."""
        return [tool.chat() for tool in self]

    def responses(self) -> list[dict[str, JsonValue]]:
        """The list for ``tools=`` of Responses."""
        return [tool.responses() for tool in self]

    def messages(self) -> list[dict[str, JsonValue]]:
        """The list for ``tools=`` of Anthropic's Messages."""
        return [tool.messages() for tool in self]


@dataclass
class _Slots:
    """What one conversation was told so far: the order of tools, and each server's last answer."""

    order: list[tuple[str, str]] = field(default_factory=list)
    answers: dict[str, list[McpTool]] = field(default_factory=dict)


_lock = threading.Lock()
_remembered: OrderedDict[tuple[str, str], _Slots] = OrderedDict()


async def list_tools(
    sessions: Mapping[str, McpSession] | Iterable[McpSession],
    *,
    ready_timeout_s: float = 5.0,
    hold_late: bool = False,
) -> ToolList:
    """All tools of all servers, every page, in (server, name) order.

    ``sessions``: by server name, or plain sessions whose servers name themselves. All are asked at once; one that has
    not answered after ``ready_timeout_s`` seconds, or fails, is left out (and named in ``missing``) and its tools are
    appended when it answers a later call. The order is frozen per open :func:`homeport.session` (per process without
    one): a tool that was away takes its old slot, and a known server that cannot be reached keeps its tools in the
    list, so that a short absence does not change the prompt.

    ``hold_late``: tools that come after the open session's first list wait for a free moment
    (:func:`homeport.free_moment`), because a longer list breaks the prompt; ``held`` names them.
    """
    if ready_timeout_s <= 0:
        raise ValueError(f"ready_timeout_s must be above 0 seconds, not {ready_timeout_s}")
    named = dict(sessions) if isinstance(sessions, Mapping) else _by_own_name(sessions)
    answers: dict[str, list[McpTool]] = {}
    with anyio.move_on_after(ready_timeout_s):
        async with anyio.create_task_group() as group:
            for server, session in named.items():
                group.start_soon(_ask, server, session, answers)
    return _merge(named, answers, hold_late)


def _by_own_name(sessions: Iterable[McpSession]) -> dict[str, McpSession]:
    named: dict[str, McpSession] = {}
    for index, session in enumerate(sessions):
        info = getattr(session, "server_info", None)
        name = getattr(info, "name", None) or f"server{index}"
        if name in named:
            raise ValueError(f"two MCP servers are named {name!r}; pass a mapping from names of your own to sessions")
        named[name] = session
    return named


async def _ask(server: str, session: McpSession, answers: dict[str, list[McpTool]]) -> None:
    try:
        tools = await _all_pages(server, session)
    except Exception as error:  # one server's fault must not take the others' tools away
        failed("mcp", error)
        return
    answers[server] = tools


async def _all_pages(server: str, session: McpSession) -> list[McpTool]:
    found: dict[str, McpTool] = {}
    cursor: str | None = None
    seen: set[str] = set()
    for _ in range(MAX_PAGES):
        page = await _page(session, cursor)
        for tool in cast("Iterable[object]", getattr(page, "tools", None) or ()):
            one = _tool(server, tool)
            found[one.name] = one
        cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
        if not cursor or cursor in seen:
            break
        seen.add(cursor)
    return [found[name] for name in sorted(found)]


async def _page(session: McpSession, cursor: str | None) -> object:
    if cursor is None:
        return await session.list_tools()
    names = inspect.signature(session.list_tools).parameters
    if "cursor" in names or "params" not in names:
        return await session.list_tools(cursor=cursor)
    try:
        from mcp_types import PaginatedRequestParams
    except ImportError:  # mcp before 2.0
        from mcp.types import PaginatedRequestParams
    return await session.list_tools(params=PaginatedRequestParams(cursor=cursor))


def _tool(server: str, tool: object) -> McpTool:
    schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}
    return McpTool(server, str(getattr(tool, "name", "")), getattr(tool, "description", None) or "", schema)


def _merge(named: Mapping[str, McpSession], answers: Mapping[str, list[McpTool]], hold_late: bool) -> ToolList:
    session = current()
    holds = hold_late and session is not None and not session.free_moment()
    key = (session.namespace, session.id) if session is not None else ("", "")
    with _lock:
        slots = _remembered.setdefault(key, _Slots())
        _remembered.move_to_end(key)
        while len(_remembered) > _MAX_REMEMBERED:
            _remembered.popitem(last=False)
        slots.answers.update(answers)
        offered = {(tool.server, tool.name): tool for server in named for tool in slots.answers.get(server, ())}
        known = set(slots.order)
        new = sorted(key for key in offered if key not in known)
        held = new if holds and known else []
        slots.order += [] if held else new
        tools = [offered[key] for key in slots.order if key in offered]
    register_names((tool.model_name, tool.server, tool.name) for tool in tools)
    missing = sorted(server for server in named if server not in answers)
    return ToolList(tools, missing, (offered[key].model_name for key in held))


def forget() -> None:
    """Forget every frozen order."""
    with _lock:
        _remembered.clear()
