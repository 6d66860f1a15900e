"""Targets are normalised before a rule looks at them; no spelling slips past the deny-list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.config import DENIED_PATHS
from homeport_proxy.ids import mint
from homeport_proxy.paths import denied, normalise, on_the_wire, split_target


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/v1/chat/completions", "/v1/chat/completions", ""),
        ("/v1/x?a=1&b=%20", "/v1/x", "?a=1&b=%20"),
        ("//v1///x/", "/v1/x", ""),
        ("/v1/./a/../b", "/v1/b", ""),
        ("/v1/%2e%2e/%2E./secret", "/secret", ""),
        ("/%76%31/x", "/v1/x", ""),
        ("/v1\\x", "/v1/x", ""),
        ("http://host:1/v1/x?q", "/v1/x", "?q"),
        ("/../../etc", "/etc", ""),
        ("/v1/models/org%2Fname", "/v1/models/org/name", ""),
    ],
)
def test_targets(target: str, path: str, query: str) -> None:
    assert split_target(target) == (path, query)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(["/", "..", ".", "v1", "load_lora_adapter", "%2e", "%2f", "x", "%", "é", "\\"]), max_size=8
    )
)
def test_normalising_is_final(parts: list[str]) -> None:
    path = normalise("/" + "".join(parts))
    assert path.startswith("/")
    assert "//" not in path
    assert ".." not in path.split("/")
    assert normalise(on_the_wire(path)) == path
    assert on_the_wire(path).isascii()


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/v1/load_lora_adapter", True),
        ("/v1/chat/completions/render", True),
        ("/v1/completions/render", True),
        ("/v1/render", False),
        ("/v1/chat/completions", False),
        ("/v1/load_lora_adapters", False),
    ],
)
def test_deny_list(path: str, refused: bool) -> None:
    assert denied(path, DENIED_PATHS) is refused


def test_ids() -> None:
    ids = {mint(96) for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {24}
