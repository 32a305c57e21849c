"""Draws that a key decides: the same in every gateway process and after every restart.

Owns hashing a key into a share or a choice. Leaves what the key is to the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b


def unit(key: str, purpose: str) -> float:
    """A number in (0, 1), even over keys, and independent from one purpose to the next."""
    digest = blake2b(f"{purpose}\0{key}".encode("utf-8", "replace"), digest_size=8).digest()
    # 53 bits are what a float holds; the half keeps it off 0 and 1.
    return ((int.from_bytes(digest, "big") >> 11) + 0.5) / 2**53


def pick(weights: Mapping[str, int], key: str, purpose: str) -> str:
    """One of the names, each for its part of the keys.

    Weighted rendezvous hashing: the name with the greatest -weight / ln(unit), so that a
    change of the weights moves no more keys than it must.
    """
    return max(weights, key=lambda name: -weights[name] / math.log(unit(key, f"{purpose}\0{name}")))
