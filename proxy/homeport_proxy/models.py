"""``GET /v1/models``: one list over all backends, in OpenAI's or Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from homeport_proxy.control import Control
from homeport_proxy.errors import model_not_found

_WILD = "*?["


def listed(control: Control) -> list[str]:
    """Names a client may ask for: of the file (plain aliases too, wildcards not), else what the backends serve."""
    configured = control.config.models
    if not configured:
        return control.fleet.models()
    names: list[str] = []
    for model in configured:
        aliases = [alias for alias in model.aliases if not any(mark in alias for mark in _WILD)]
        names += [name for name in (model.name, *aliases) if name not in names]
    return names


def answer(control: Control, path: str, *, anthropic: bool) -> dict[str, object]:
    """The list, or one model when ``path`` names it. Raises ProxyError 404 for an unknown one."""
    names = listed(control)
    created_s = int(control.started_unix_s)
    wanted = path.removeprefix("/v1/models").strip("/")
    if wanted:
        if control.config.model(wanted) is None or (not control.config.models and wanted not in names):
            raise model_not_found(wanted, names)
        return _one(control, wanted, created_s, anthropic=anthropic)
    entries = [_one(control, name, created_s, anthropic=anthropic) for name in names]
    return _page(entries, names) if anthropic else {"object": "list", "data": entries}


def _one(control: Control, name: str, created_s: int, *, anthropic: bool) -> dict[str, object]:
    if anthropic:
        created = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}
    entry: dict[str, object] = {"id": name, "object": "model", "created": created_s, "owned_by": "homeport"}
    model = control.config.model(name)
    length = control.fleet.max_model_len(model.name) if model is not None else None
    if length is not None:
        entry["max_model_len"] = length
    return entry


def _page(entries: Sequence[dict[str, object]], names: Sequence[str]) -> dict[str, object]:
    return {
        "data": list(entries),
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
