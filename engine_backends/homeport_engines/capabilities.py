"""Which requests cannot be split over a prefill and a decode engine: a table of API x feature x connector.

A split request is prefilled by one engine and continued by another, so anything that needs the prompt's logits, several
continuations of one hand-off, or state that lies on one engine must stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from homeport.fingerprint import Api, JsonValue


@dataclass(frozen=True, slots=True)
class Feature:
    """A request feature: the body's members that ask for it, how to see it, and why it keeps the legs together."""

    name: str
    members: tuple[str, ...]
    asked: Callable[[Mapping[str, JsonValue]], bool]
    why: str


def _number_above(member: str, limit: int) -> Callable[[Mapping[str, JsonValue]], bool]:
    def asked(body: Mapping[str, JsonValue]) -> bool:
        value = body.get(member)
        return isinstance(value, (int, float)) and value > limit

    return asked


def _truthy(member: str) -> Callable[[Mapping[str, JsonValue]], bool]:
    return lambda body: bool(body.get(member))


def _given(member: str) -> Callable[[Mapping[str, JsonValue]], bool]:
    return lambda body: body.get(member) is not None


def _several_prompts(body: Mapping[str, JsonValue]) -> bool:
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


_ENGINE_RUNS = ("web_search_preview", "code_interpreter", "container", "mcp")
"""Tools that vLLM (0.32) runs itself, given a tool server; others, like Codex's ``web_search``, are the client's."""


def _hosted_tools(body: Mapping[str, JsonValue]) -> bool:
    tools = body.get("tools")
    if not isinstance(tools, list):
        return False
    return any(isinstance(tool, dict) and tool.get("type") in _ENGINE_RUNS for tool in tools)


FEATURES: Mapping[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("choices", ("n",), _number_above("n", 1), "n > 1: one hand-off serves one continuation"),
        Feature("best_of", ("best_of",), _number_above("best_of", 1), "best_of needs several continuations"),
        Feature("beam", ("use_beam_search",), _truthy("use_beam_search"), "beam search needs several continuations"),
        Feature("echo", ("echo",), _truthy("echo"), "echo returns the prompt from the engine that computed it"),
        Feature(
            "prompt_logprobs",
            ("prompt_logprobs",),
            _given("prompt_logprobs"),
            "prompt_logprobs come from the engine that computed the prompt",
        ),
        Feature("batch", ("prompt",), _several_prompts, "several prompts in one request"),
        Feature("embeds", ("prompt_embeds",), _given("prompt_embeds"), "prompt embeddings have no prefix to look up"),
        Feature(
            "stored",
            ("previous_response_id", "conversation"),
            lambda body: body.get("previous_response_id") is not None or body.get("conversation") is not None,
            "the conversation is stored on one engine",
        ),
        Feature("background", ("background",), _truthy("background"), "background answers are stored on one engine"),
        Feature("hosted_tools", ("tools",), _hosted_tools, "the engine runs tools between several generations"),
    )
}

_OPENAI_TEXT = ("choices", "best_of", "beam", "echo", "prompt_logprobs", "batch", "embeds")
_BY_API: Mapping[Api, tuple[str, ...]] = {
    "chat": ("choices", "best_of", "beam", "echo", "prompt_logprobs"),
    "completions": _OPENAI_TEXT,
    "responses": ("stored", "background", "hosted_tools"),
    "messages": (),
}
# a shared store hands nothing from request to request: only what needs the prompt's own logits keeps together
_STORE_BY_API: Mapping[Api, tuple[str, ...]] = {
    "chat": ("echo", "prompt_logprobs"),
    "completions": ("echo", "prompt_logprobs", "embeds"),
    "responses": ("stored", "background", "hosted_tools"),
    "messages": (),
}
TABLE: Mapping[str, Mapping[Api, tuple[str, ...]]] = {
    "nixl": _BY_API,
    "nixl-push": _BY_API,
    "mooncake": _BY_API,
    "store": _STORE_BY_API,
    # SGLang takes an array of rooms for a batch, but each answer still continues one hand-off
    "bootstrap": _BY_API,
}
MEMBERS: frozenset[str] = frozenset(member for feature in FEATURES.values() for member in feature.members)
"""The body members :func:`refuses` looks at; a caller need not decode others."""


def refuses(connector: str, api: Api, body: Mapping[str, JsonValue]) -> str | None:
    """Why this request cannot be split with this connector (a sentence fragment), or None when it can."""
    names: Sequence[str] = TABLE[connector].get(api, ())
    return next((FEATURES[name].why for name in names if FEATURES[name].asked(body)), None)
