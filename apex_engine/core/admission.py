"""What a prompt may do to the slots that decoding fills.

A prompt goes through nearly all experts once. Streamed, it fills free slots, each layer its share of them, takes the place of
twins of the same layer that the policy values less, and sends the rest through a few slots that it uses over and over.
"""

from __future__ import annotations


def share(slots: int, layers: int) -> int:
    """Slots of a layer while a prompt streams."""
    return -(-slots // layers)


def most_passing(slots: int) -> int:
    """Slots that a streamed prompt may use over and over: two at least, so that one is filled while the other computes."""
    return max(slots // 8, 2 if slots > 4 else 1)


def passes(share: int | None, free: bool, held: int) -> bool:
    """Whether a twin only passes through. `share`: of its layer, None where nothing is streamed; `free`: whether a slot is;
    `held`: slots that the layer holds to stay."""
    return share is not None and (not free or held >= share)
