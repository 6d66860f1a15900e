"""A tokenizer that needs no model: four bytes of UTF-8 are one token, and the token's number is those bytes.

It is deterministic, the same in every process, reversible, and prefix-stable: a longer text changes at most the last,
shorter token of a shorter one. Text pieces are big-endian numbers of four bytes; a last piece of fewer bytes is filled
with 0xFF, which UTF-8 never contains; special tokens contain 0xFE, which it never contains either. So no two texts
share tokens, and ids are below 2**32.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

PIECE_BYTES = 4
START = 0xFE01  # begins a message
END = 0xFE02  # ends a message; an assistant message that ends by itself ends with it
IMAGE = 0xFE03  # stands for any part that is not text
_SPECIAL = {START: "<|im_start|>", END: "<|im_end|>", IMAGE: "<|image|>"}


def tokenize(text: str) -> array[int]:
    """The tokens of a text, without special tokens."""
    data = text.encode("utf-8", "surrogatepass")
    data += b"\xff" * (-len(data) % PIECE_BYTES)
    tokens = array("I", data)
    if sys.byteorder == "little":
        tokens.byteswap()
    return tokens


def token_bytes(token: int) -> bytes:
    """The bytes a text token stands for; empty for a special token or a number that is none."""
    if token in _SPECIAL or not 0 <= token < 1 << 32:
        return b""
    return token.to_bytes(PIECE_BYTES, "big").replace(b"\xff", b"")


def detokenize(tokens: Iterable[int], *, skip_special: bool = True) -> str:
    """The text of tokens; bytes that are no UTF-8 become replacement characters."""
    pieces = (
        _SPECIAL[token].encode() if token in _SPECIAL and not skip_special else token_bytes(token) for token in tokens
    )
    return b"".join(pieces).decode("utf-8", "replace")
