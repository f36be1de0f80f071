"""Which experts a later layer will choose, from this layer's router input: gate reuse (MoE-APEX, layer level).

The residual stream changes little from layer to layer, so the router of a later layer is asked with the input of this one. It is
the model's own router module that is asked, so softmax, sigmoid, biased and grouped routers all choose as they do. One layer is
asked at a time: the walk of the engine stops at the first layer with a missing expert, mostly the next one, so that asking p
layers at once would cost more than it saves.

A router's input is normalised with the norm weight of its own layer. `correct_norm` divides this layer's out and multiplies the
later one's in.

Routers, their extra arguments and norms are learnt while the first pass runs. A layer whose router cannot be asked this way, or
does not choose what it chose then, is not predicted; `Predictor.unknown` names it.

Letters: T tokens, K chosen experts a token, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Predictor:
    """The routers of all MoE layers, in order."""

    def __init__(self, layers: list[tuple[nn.Module, nn.Module]], correct_norm: bool) -> None:
        """`layers`: for each MoE layer, the decoder layer and the MoE block in it."""
        self._known: list[_Layer | None] = [None] * len(layers)
        self._norms: list[Tensor | None] = [None] * len(layers)  # weights [H]
        self._correct_norm = correct_norm
        self._hooks: list[list[Any]] = [
            self._learn(i, decoder_layer, block) for i, (decoder_layer, block) in enumerate(layers)
        ]
        self._scale: dict[tuple[int, int], Tensor] = {}

    @property
    def ready(self) -> bool:
        """Whether a pass has shown the routers of all layers."""
        return not any(self._hooks)

    @property
    def unknown(self) -> list[int]:
        """Layers that are not predicted, once `ready`."""
        return [i for i, layer in enumerate(self._known) if layer is None]

    def predict(self, now: int, later: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Router input `[T, H]` of layer `now` -> gate weights and choice `[T, K]` of layer `later`; None where unknown."""
        layer = self._known[later]
        if layer is None:
            return None
        if self._correct_norm:
            if (now, later) not in self._scale:
                mine, its = self._norms[now], self._norms[later]
                self._scale[now, later] = x.new_ones(x.shape[1]) if mine is None or its is None else its / mine
            x = x * self._scale[now, later]
        return layer.route(x)

    def _learn(self, index: int, decoder_layer: nn.Module, block: nn.Module) -> list[Any]:
        """Watches one call of the block's router, and of the norm whose output is the block's input."""
        norm_of: dict[int, nn.Module] = {}  # address of its output -> norm
        router = next((child for name, child in block.named_children() if name in ("gate", "router")), None)
        if router is None:
            return []

        def norm_called(norm: nn.Module, _: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                norm_of[out.data_ptr()] = norm

        def router_called(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            found = _as_choice(out)
            if x is not None and found is not None:
                layer = _Layer(module, args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})
                again = layer.route(x.reshape(-1, x.shape[-1]))
                if again is not None and all(torch.equal(a, b) for a, b in zip(again, found, strict=True)):
                    self._norms[index] = _weight_of(norm_of.get(x.data_ptr()), x)
                    self._known[index] = layer
            for hook in self._hooks[index]:
                hook.remove()
            self._hooks[index] = []

        norms = [child for _, child in decoder_layer.named_children() if hasattr(child, "weight")]
        return [
            *(norm.register_forward_hook(norm_called) for norm in norms),
            router.register_forward_hook(router_called, with_kwargs=True),
        ]


class _Layer:
    """How to ask one router."""

    def __init__(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._router, self._args, self._kwargs = router, args, kwargs

    def route(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        # Past the module's hooks: a user who records router logits wants the real ones only.
        return _as_choice(self._router.forward(x, *self._args, **self._kwargs))


def _as_choice(out: Any) -> tuple[Tensor, Tensor] | None:
    """(gate weights, choice) of what a router returns: (logits, weights, indices) in transformers."""
    if isinstance(out, tuple) and len(out) == 3 and all(isinstance(part, Tensor) for part in out):
        _, weights, chosen = out
        if weights.shape == chosen.shape and not chosen.is_floating_point():
            return weights, chosen
    return None


def _weight_of(norm: nn.Module | None, x: Tensor) -> Tensor | None:
    """What a norm multiplies with, whatever it adds to its weight: its answer to an input of mean 0 and variance 1."""
    if norm is None:
        return None
    signs = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    signs[1::2] = -1
    scale = type(norm).forward(norm, signs[None])[0] * signs
    return scale if bool((scale != 0).all()) else None
