"""Sessions by name: ids that travel, blocks, parents, hints by hand; conversations without a name."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import homeport
from homeport.conversations import Conversations
from homeport.fingerprint import Identity
from homeport.session import Session, affinity_id, affinity_uuid, current, session

ANY = st.text(max_size=60)


@given(ANY, ANY, ANY, ANY)
def test_ids_are_pure_ascii_short_and_apart(namespace: str, one: str, other_namespace: str, other: str) -> None:
    value = affinity_id(namespace, one)
    assert value == affinity_id(namespace, one)
    assert re.fullmatch(r"[a-z0-9-]{1,64}", value)
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", affinity_uuid(namespace, one)
    )
    assert (value == affinity_id(other_namespace, other)) == ((namespace, one) == (other_namespace, other))


def test_the_id_itself_does_not_travel() -> None:
    assert "ada@example.org" not in affinity_id("", "ada@example.org")


def test_an_id_is_the_same_in_every_release() -> None:
    assert affinity_id("", "task-42") == "hp-721c38e5e2a11c8e5f3cec306385afd8"


def test_blocks_nest_and_may_be_left_in_any_order() -> None:
    assert current() is None
    with session("a") as a:
        with session("a/b", parent=a) as b:
            assert current() is b
            assert (b.parent, b.kind) == ("a", "subagent")
        assert current() is a
    stack = contextlib.ExitStack()
    a.__enter__()
    stack.enter_context(b)
    a.__exit__(None, None, None)
    assert current() is b
    stack.close()
    assert current() is None


async def test_a_block_holds_for_the_tasks_it_starts_and_no_others() -> None:
    async def inside() -> str | None:
        await asyncio.sleep(0)
        found = current()
        return found.id if found else None

    outer = asyncio.create_task(inside())
    with session("s"):
        inner = asyncio.create_task(inside())
    assert (await outer, await inner) == (None, "s")


async def test_a_block_in_an_async_generator() -> None:
    async def numbers():
        with session("g"):
            yield current()

    generator = numbers()
    assert (await anext(generator)).id == "g"
    await generator.aclose()


@pytest.mark.parametrize(("bad", "says"), [("", "not empty"), (None, "must be a string"), (7, "must be a string")])
def test_bad_ids(bad: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        session(bad)  # type: ignore[arg-type]


def test_nobody_is_his_own_parent() -> None:
    with pytest.raises(ValueError, match="own parent"):
        session("a", parent="a")


def test_hints_by_hand() -> None:
    s = session("task", parent="root")
    assert s.headers() == {
        "x-session-affinity": affinity_id("", "task"),
        "x-parent-session-affinity": affinity_id("", "root"),
        "x-homeport-kind": "subagent",
    }
    assert s.extra_body() == {"prompt_cache_key": affinity_id("", "root")}
    assert s.headers("https://api.openai.com/v1") == {}
    assert s.extra_body("https://api.anthropic.com") == {}
    assert s.headers("https://openrouter.ai/api/v1") == {"x-session-id": affinity_id("", "task")}


def test_namespaces_keep_books_and_ids_apart() -> None:
    assert session("s", namespace="a").affinity != session("s", namespace="b").affinity
    assert homeport.report(session("s", namespace="a")).requests == 0


# --- conversations nobody named --------------------------------------------------------------------------------------


def identity(head: str, *messages: str) -> Identity:
    chain: list[bytes] = []
    text = ""
    for message in messages:
        text += f"\0{message}"
        chain.append(text.encode())
    return Identity(f"{head}|{messages[0] if messages else ''}".encode(), tuple(chain))


@pytest.mark.parametrize(
    ("requests", "names"),
    [
        # a conversation grows
        ([("h", "a"), ("h", "a", "b", "c"), ("h", "a", "b", "c", "d", "e")], "xxx"),
        # sent again by a retry
        ([("h", "a"), ("h", "a"), ("h", "a", "b", "c"), ("h", "a", "b", "c")], "xxxx"),
        # another first message is another conversation
        ([("h", "a"), ("h", "b")], "xy"),
        # the same first words under another system prompt, twice
        ([("h", "hi"), ("g", "hi"), ("h", "hi", "1", "2"), ("g", "hi", "3", "4")], "xyxy"),
        # a system prompt that changes in the middle, beyond what masking takes out
        ([("h", "a"), ("h", "a", "b", "c"), ("g", "a", "b", "c", "d", "e")], "xxx"),
        # forks of one conversation stay with it
        ([("h", "a"), ("h", "a", "b", "c"), ("h", "a", "b", "x")], "xxx"),
        # an edited history still begins alike
        ([("h", "a"), ("h", "a", "b", "c"), ("h", "a", "B", "c")], "xxx"),
    ],
)
def test_which_conversation(requests: list[tuple[str, ...]], names: str) -> None:
    conversations = Conversations()
    found = [conversations.of(identity(*request)) for request in requests]
    letters: dict[str, str] = {}
    assert "".join(letters.setdefault(name, "xyz"[len(letters)]) for name in found) == names


def test_conversations_are_bounded() -> None:
    conversations = Conversations(max_ends=100)
    for index in range(1_000):
        conversations.of(identity("h", str(index)))
    assert len(conversations._ends) <= 100
    for index in range(1_000):
        conversations.of(identity(str(index), "same"))
    assert max(len(ends) for ends in conversations._ends.values()) <= 64


# --- importing -------------------------------------------------------------------------------------------------------

ALONE = """
import builtins, sys
allowed = {
    "pydantic", "pydantic_core", "anyio", "typing_extensions", "annotated_types", "typing_inspection", "sniffio",
    "idna", "homeport",
}
class Only:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in allowed and root not in sys.stdlib_module_names and not root.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Only())
import homeport
for name in homeport.__all__:
    getattr(homeport, name)
from homeport import Usage, explain
with homeport.session("s") as s:
    plan = homeport.stabilise({"tools": [{"name": "b", "input_schema": {}}, {"name": "a", "input_schema": {}}]})
    assert [t["name"] for t in plan.body["tools"]] == ["a", "b"]
    assert explain(None, {"model": "m", "messages": []})
    print(s.report())
try:
    homeport.transport()
except ImportError as error:
    assert "pip install httpx2" in str(error)
else:
    raise AssertionError
import homeport.session, homeport.stabilise
assert callable(homeport.session) and callable(homeport.stabilise)
"""


def test_the_package_works_with_pydantic_and_anyio_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_is_lazy() -> None:
    heavy = {"pydantic", "anyio", "httpx", "httpx2", "sqlite3", "asyncio"}
    code = f"import homeport, sys; print(*(name for name in sys.modules if name in {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_names_that_are_modules_too() -> None:
    import homeport.explain
    import homeport.report
    import homeport.session
    import homeport.transport
    import homeport.volatile

    for name in ("session", "report", "explain", "stabilise", "transport", "volatile"):
        assert callable(getattr(homeport, name))
    assert isinstance(homeport.session("x"), Session)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = homeport.nothing
