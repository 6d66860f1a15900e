"""MCP tool lists over the official client and server: pages, order, late servers, reconnects, shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

import homeport
from homeport.mcp import McpTool, ToolList, list_tools
from homeport.stabilise import stabilise

mcp = pytest.importorskip("mcp")
import mcp_types as types  # noqa: E402
from mcp.server import Server  # noqa: E402


class Toolbox:
    """A real MCP server: its tools in whatever order and pages, slow or broken on demand."""

    def __init__(self, name: str, *tools: str, page: int = 100) -> None:
        self.name, self.tools, self.page = name, list(tools), page
        self.ready = anyio.Event()
        self.ready.set()
        self.broken = False
        self.pages_served = 0
        self.server = Server(name, on_list_tools=self._list)

    async def _list(self, _: object, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        await self.ready.wait()
        if self.broken:
            raise RuntimeError("restarting")
        self.pages_served += 1
        start = int(params.cursor) if params and params.cursor else 0
        schema = {
            "type": "object",
            "required": ["b", "a"],
            "properties": {"b": {"type": "string"}, "a": {"type": "string"}},
        }
        found = [
            types.Tool(name=name, description=f"{name}!", input_schema=schema)
            for name in self.tools[start : start + self.page]
        ]
        following = str(start + self.page) if start + self.page < len(self.tools) else None
        return types.ListToolsResult(tools=found, next_cursor=following, ttl_ms=0, cache_scope="private")


@asynccontextmanager
async def clients(*boxes: Toolbox) -> AsyncIterator[dict[str, object]]:
    async with AsyncExitStack() as stack:
        yield {box.name: await stack.enter_async_context(mcp.Client(box.server)) for box in boxes}


def pairs(tools: ToolList) -> list[tuple[str, str]]:
    return [(tool.server, tool.name) for tool in tools]


async def test_all_pages_in_order_whatever_the_servers_say() -> None:
    git = Toolbox("git", "log", "diff", "blame", "add", "commit", page=2)
    fs = Toolbox("fs", "write", "read")
    async with clients(git, fs) as sessions:
        tools = await list_tools(sessions)
        assert pairs(tools) == [
            ("fs", "read"), ("fs", "write"),
            ("git", "add"), ("git", "blame"), ("git", "commit"), ("git", "diff"), ("git", "log"),
        ]  # fmt: skip
        assert git.pages_served == 3
        git.tools.reverse()
        assert pairs(await list_tools(sessions)) == pairs(tools)


async def test_sessions_without_names_are_named_by_their_servers() -> None:
    async with clients(Toolbox("b", "x"), Toolbox("a", "x")) as sessions:
        assert pairs(await list_tools(list(sessions.values()))) == [("a", "x"), ("b", "x")]
        raw = [client.session for client in sessions.values()]
        assert pairs(await list_tools(raw)) == [("a", "x"), ("b", "x")]


async def test_a_late_server_is_appended() -> None:
    fast, slow = Toolbox("m", "x"), Toolbox("a", "y")
    slow.ready = anyio.Event()
    async with clients(fast, slow) as sessions:
        tools = await list_tools(sessions, ready_timeout_s=0.2)
        assert (pairs(tools), tools.missing) == ([("m", "x")], ("a",))
        slow.ready.set()
        tools = await list_tools(sessions)
        assert (pairs(tools), tools.missing) == ([("m", "x"), ("a", "y")], ())


async def test_a_server_that_restarts_keeps_its_slot_and_its_tools() -> None:
    one, two = Toolbox("a", "x", "y"), Toolbox("b", "x")
    async with clients(one, two) as sessions:
        before = await list_tools(sessions)
        one.broken = True
        during = await list_tools(sessions)
        assert (list(during), during.missing) == (list(before), ("a",))
        one.broken = False
        assert list(await list_tools(sessions)) == list(before)
        assert homeport.failures() == {"mcp": 1}


async def test_a_tool_the_server_took_away_goes_and_returns_to_its_slot() -> None:
    box = Toolbox("a", "x", "y", "z")
    async with clients(box) as sessions:
        await list_tools(sessions)
        box.tools = ["z", "x", "new"]
        assert [tool.name for tool in await list_tools(sessions)] == ["x", "z", "new"]
        box.tools = ["z", "y", "x", "new"]
        assert [tool.name for tool in await list_tools(sessions)] == ["x", "y", "z", "new"]


async def test_the_order_is_frozen_per_session() -> None:
    box, late = Toolbox("m", "x"), Toolbox("a", "y")
    async with clients(box, late) as sessions:
        with homeport.session("one"):
            await list_tools({"m": sessions["m"]})
            assert pairs(await list_tools(sessions)) == [("m", "x"), ("a", "y")]
        with homeport.session("two"):
            assert pairs(await list_tools(sessions)) == [("a", "y"), ("m", "x")]


async def test_a_server_that_pages_in_circles_ends() -> None:
    class Circles:
        async def list_tools(self, cursor: str | None = None) -> object:
            return types.ListToolsResult(
                tools=[types.Tool(name="x", input_schema={})], next_cursor="again", ttl_ms=0, cache_scope="private"
            )

    assert pairs(await list_tools({"c": Circles()})) == [("c", "x")]


async def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="ready_timeout_s"):
        await list_tools({}, ready_timeout_s=0)
    async with clients(Toolbox("a", "x")) as sessions:
        with pytest.raises(ValueError, match="two MCP servers are named 'a'"):
            await list_tools([sessions["a"], sessions["a"]])


async def test_shapes_of_the_apis() -> None:
    async with clients(Toolbox("git", "log")) as sessions:
        tools = await list_tools(sessions)
    schema = {
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "required": ["a", "b"],
        "type": "object",
    }
    name = "mcp__git__log"
    assert json.dumps(tools.messages()) == json.dumps([{"name": name, "description": "log!", "input_schema": schema}])
    assert tools.chat() == [
        {"type": "function", "function": {"name": name, "description": "log!", "parameters": schema}}
    ]
    flat = {"type": "function", "name": name, "description": "log!", "parameters": schema, "strict": False}
    assert tools.responses() == [flat]
    assert tools.origin(name) == ("git", "log")


@pytest.mark.parametrize(
    ("server", "tool"),
    [("a b", "c.d"), ("é", "x"), ("s" * 60, "t" * 60), ("a", "b" * 64), ("a b", "c_d"), ("a_b", "c.d")],
)
def test_names_fit_the_apis_and_stay_apart(server: str, tool: str) -> None:
    name = McpTool(server, tool).model_name
    assert len(name) <= 64
    assert name.isascii()
    assert name.replace("_", "").replace("-", "").isalnum()
    assert name != McpTool("a_b", "c_d").model_name


def test_no_two_pairs_share_a_name() -> None:
    pairs = [("a__b", "c"), ("a", "b__c"), ("a_", "c"), ("a", "_c"), ("a b", "c"), ("a.b", "c")]
    assert len({McpTool(*pair).model_name for pair in pairs}) == len(pairs)


async def test_the_stabiliser_knows_them_by_name() -> None:
    """A name that had to be changed says nothing of MCP any more; the list has told the stabiliser."""
    from homeport.call import mcp_names

    async with clients(Toolbox("my server", "log")) as sessions:
        tools = (await list_tools(sessions)).chat()
    own = {"type": "function", "function": {"name": "zoom", "parameters": {}}}
    plan = stabilise({"tools": [*tools, own]}, mcp_tools=mcp_names())
    assert plan.body["tools"][0]["function"]["name"] == "zoom"
