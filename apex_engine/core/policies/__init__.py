"""Eviction policies, one a file. A new one is a file here and a line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

from apex_engine.core.policies.base import Policy
from apex_engine.core.policies.lcu import Lcu
from apex_engine.core.policies.lfru import Lfru
from apex_engine.core.policies.lfu import Lfu
from apex_engine.core.policies.lru import Lru
from apex_engine.core.policies.next_use import NextUse
from apex_engine.core.vocabulary import Geometry

POLICIES: dict[str, Callable[[Geometry], Policy]] = {
    "next-use": NextUse,
    "lcu": Lcu,
    "lru": Lru,
    "lfu": Lfu,
    "lfru": Lfru,
}
