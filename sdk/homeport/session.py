"""Who is speaking: session ids, parents, and the session that is open in this task."""

from __future__ import annotations

import json
from hashlib import blake2b


def affinity_id(namespace: str, conversation: str) -> str:
    """The id that travels for a conversation: a pure digest of (namespace, id), ASCII, 35 characters.

    The same in every process and on every machine; the id itself cannot be read from it.
    """
    # JSON keeps ("a", "bc") and ("ab", "c") apart and is defined for every str, lone surrogates included
    text = json.dumps([namespace, conversation])
    return "hp-" + blake2b(text.encode("ascii"), digest_size=16, person=b"homeport").hexdigest()
