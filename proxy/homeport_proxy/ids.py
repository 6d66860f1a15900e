"""Ids that are unique, not secret: cheap enough for every attempt."""

from __future__ import annotations

import os
import random

_dice = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_dice.seed)  # a forked worker must not repeat its parent's ids


def mint(bits: int) -> str:
    """``bits`` random bits (whole bytes) in hexadecimal, always of the same length."""
    return _dice.getrandbits(bits).to_bytes(bits // 8).hex()
