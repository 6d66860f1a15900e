"""Token counts without asking anybody: calibrated by the providers' own usage, counted where a tokenizer lies on disk.

Nothing is ever downloaded. Without a tokenizer's files and without usage the fallback is 4 characters a token.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

CHARS_PER_TOKEN = 4.0
_MAX_MODELS = 256
_WEIGHT = 0.2


class Calibration:
    """Bytes of canonical prompt text per input token, by model, learned from usage: a running mean that forgets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_per_token: OrderedDict[str, float] = OrderedDict()

    def learn(self, model: str, prompt_bytes: int, input_tokens: int | None) -> None:
        """Take one answered request. Implausible pairs (an image, a truncated prompt) are passed over."""
        if not input_tokens or prompt_bytes < 256:
            return
        ratio = prompt_bytes / input_tokens
        if not 0.5 <= ratio <= 16:
            return
        with self._lock:
            known = self._bytes_per_token.get(model)
            self._bytes_per_token[model] = ratio if known is None else known + _WEIGHT * (ratio - known)
            self._bytes_per_token.move_to_end(model)
            while len(self._bytes_per_token) > _MAX_MODELS:
                self._bytes_per_token.popitem(last=False)

    def bytes_per_token(self, model: str) -> float | None:
        """The model's ratio; None before any usage was seen."""
        with self._lock:
            return self._bytes_per_token.get(model)


calibration = Calibration()
"""This process's own, fed by every answer that attached clients get."""


def count(text: str, model: str = "") -> int:
    """Tokens of ``text``: counted when the model's tokenizer is on this machine, else estimated from what the provider
    counted in this process's prompts, else 4 characters a token."""
    tokenizer = tokenizer_for(model)
    if tokenizer is not None:
        return tokenizer(text)
    known = calibration.bytes_per_token(model)
    return round(len(text) / CHARS_PER_TOKEN if known is None else len(text.encode("utf-8", "surrogatepass")) / known)


@lru_cache(maxsize=32)
def tokenizer_for(model: str) -> Callable[[str], int] | None:
    """A counter for a model whose tokenizer files are on this machine; None when there are none."""
    return _local_tokenizer(model) or _cached_tiktoken(model)


def _local_tokenizer(model: str) -> Callable[[str], int] | None:
    """``tokenizer.json`` in the folder that the model's name is, or in the Hugging Face cache."""
    path = next((path for path in _tokenizer_files(model) if path.is_file()), None)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _tokenizer_files(model: str) -> list[Path]:
    if not model:
        return []
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}" / "snapshots"
    try:
        return [Path(model) / "tokenizer.json", *sorted(cached.glob("*/tokenizer.json"))]
    except OSError:
        return []


_TIKTOKEN_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"


def _cached_tiktoken(model: str) -> Callable[[str], int] | None:
    """tiktoken, only when its vocabulary file is in its cache folder already: it would download it else."""
    try:
        import tiktoken
        from tiktoken.model import encoding_name_for_model
    except ImportError:
        return None
    try:
        name = encoding_name_for_model(model)
    except KeyError:
        return None
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    root = Path(folder) if folder else Path(tempfile.gettempdir()) / "data-gym-cache"
    # the cache names a file by the digest of its address
    key = hashlib.sha1(_TIKTOKEN_URL.format(name).encode(), usedforsecurity=False).hexdigest()
    if not (root / key).is_file():
        return None
    encoding = tiktoken.get_encoding(name)
    return lambda text: len(encoding.encode(text, disallowed_special=()))
