"""What the proxy itself refuses or fails with, rendered in the shape of the API that was called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

ANTHROPIC_APIS = frozenset({"messages", "count_tokens"})

_OPENAI_TYPES = {429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ProxyError(Exception):
    """A failure of ours that a client sees.

    ``status`` is the HTTP status in OpenAI's terms (Anthropic's 529 is derived when rendering), ``code`` our stable
    word, ``message`` one sentence with the remedy. ``may_be_generating`` says that an engine may still work on the
    request, so a client must not send it again by itself.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
        may_be_generating: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # it may quote what a client sent, half a surrogate pair included, which no answer could carry
        message = message.encode("utf-8", "replace").decode()
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param
        self.may_be_generating = may_be_generating
        self.headers: Mapping[str, str] = headers or {}


def invalid_request(message: str, param: str | None = None, *, status: int = 400) -> ProxyError:
    """400: the request cannot be served as it stands."""
    return ProxyError(status, "invalid_request", message, param=param)


def invalid_api_key() -> ProxyError:
    """401: no key, or one that belongs to no tenant. Says nothing about which."""
    message = "The API key is missing or not known here; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return ProxyError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def model_not_found(model: str, known: Iterable[str] = ()) -> ProxyError:
    """404: no backend serves this model."""
    served = sorted(known)[:20]
    hint = f" Served here: {', '.join(served)}." if served else ""
    return ProxyError(404, "model_not_found", f"The model `{model}` is not served here.{hint}", param="model")


def method_not_allowed(method: str, allowed: Iterable[str]) -> ProxyError:
    """405: the path is served, but not for this method."""
    may = ", ".join(sorted(allowed))
    return ProxyError(405, "invalid_request", f"{method} is not allowed here; use {may}.", headers={"allow": may})


def request_too_large(limit_bytes: int) -> ProxyError:
    """413: the body is longer than ``limits.body_bytes``."""
    return ProxyError(413, "request_too_large", f"The request body is longer than {limit_bytes} bytes.")


def rate_limited(message: str, retry_after_s: float) -> ProxyError:
    """429: over a tenant's limit."""
    return ProxyError(429, "rate_limited", message, retry_after_s=retry_after_s)


def overloaded(message: str, retry_after_s: float = 1.0) -> ProxyError:
    """503: the proxy's own queue is full, or it is stopping."""
    return ProxyError(503, "overloaded", message, retry_after_s=retry_after_s)


def no_backend(message: str, retry_after_s: float = 1.0) -> ProxyError:
    """503: no engine took the connection, or none may be tried."""
    return ProxyError(503, "no_backend", message, retry_after_s=retry_after_s)


def upstream_error(message: str, *, may_be_generating: bool) -> ProxyError:
    """502: an engine took the request and then failed."""
    return ProxyError(502, "upstream_error", message, may_be_generating=may_be_generating)


def upstream_timeout(message: str) -> ProxyError:
    """504: an engine took the request and fell silent; it may still be generating."""
    return ProxyError(504, "upstream_timeout", message, may_be_generating=True)


def render(error: ProxyError, api: str, request_id: str) -> tuple[int, dict[str, str], bytes]:
    """The whole answer for ``error``: status, headers and JSON body in the shape of ``api``."""
    headers = {"content-type": "application/json", **error.headers}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.may_be_generating:
        headers["x-should-retry"] = "false"
    status = 529 if api in ANTHROPIC_APIS and error.status == 503 else error.status
    return status, headers, msgspec.json.encode(error_object(error, api, request_id))


def error_object(error: ProxyError, api: str, request_id: str) -> dict[str, object]:
    """The JSON object of an error answer: OpenAI's ``{"error": ...}``, or Anthropic's for its own API."""
    if api in ANTHROPIC_APIS:
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def stream_frame(error: ProxyError, api: str, request_id: str, sequence: int = 0) -> bytes:
    """The SSE frame that ends a stream which has begun, in the vocabulary of ``api``; no ``[DONE]`` follows it.

    Responses streams carry a flat ``error`` event, numbered ``sequence``; Anthropic's ``event: error``; chat and
    completions a bare ``data:`` with the error object.
    """
    if api == "responses":
        event = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(event | {"sequence_number": sequence}) + b"\n\n"
    prefix = b"event: error\n" if api in ANTHROPIC_APIS else b""
    return prefix + b"data: " + msgspec.json.encode(error_object(error, api, request_id)) + b"\n\n"
