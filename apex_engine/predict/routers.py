"""The routers of a model, and how to ask them.

Routers, their extra arguments and norms are found while the first pass runs. A layer whose router cannot be asked by itself, or
does not choose what it chose then, is not known.

Letters: T tokens, K chosen experts a token, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Router:
    """How to ask one router."""

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self._args, self._kwargs = module, args, kwargs
        self.linear = False  # its logits are its `weight` times its input, with a `bias` or without
        # Its choice are so many of the largest logits, and the gate weights go like their exponentials; 0: it chooses otherwise.
        self.largest = 0

    def route(self, x: Tensor, module: Any = None) -> tuple[Tensor, Tensor] | None:
        """Gate weights and choice `[T, K]` for `x` `[T, H]`; `module`: a copy to ask in its place."""
        # Past the module's hooks: a user who records router logits wants the real ones only.
        return as_choice((module or self.module).forward(x, *self._args, **self._kwargs))

    @torch.no_grad()
    def examine(self, x: Tensor, logits: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Find out what kind of router it is from what it made of `x` `[T, H]`."""
        weight, bias = getattr(self.module, "weight", None), getattr(self.module, "bias", None)
        if not isinstance(weight, nn.Parameter) or weight.shape != (logits.shape[-1], x.shape[-1]):
            return
        logits = logits.reshape(len(x), -1).float()
        expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
        if not (expected - logits).norm() <= 0.02 * expected.norm():  # the router may compute in bfloat16
            return
        self.linear = True
        top, order = logits.topk(chosen.shape[1])
        shares, softmax = weights.float() / weights.float().sum(-1, keepdim=True), top.softmax(-1)
        if torch.equal(order.sort()[0], chosen.sort()[0]) and torch.allclose(
            shares.sort()[0], softmax.sort()[0], atol=0.02
        ):
            self.largest = chosen.shape[1]


class Routers:
    """The routers of all MoE layers, in order, as far as they are known."""

    def __init__(self, layers: list[tuple[nn.Module, nn.Module]]) -> None:
        """`layers`: for each MoE layer, the decoder layer and the MoE block in it."""
        self.known: list[Router | None] = [None] * len(layers)
        self.norms: list[Tensor | None] = [None] * len(layers)  # what a router's input was multiplied with last: [H]
        self._hooks: list[list[Any]] = [
            self._find(i, decoder_layer, block) for i, (decoder_layer, block) in enumerate(layers)
        ]

    @property
    def ready(self) -> bool:
        """Whether a pass has shown the routers of all layers."""
        return not any(self._hooks)

    def _find(self, index: int, decoder_layer: nn.Module, block: nn.Module) -> list[Any]:
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
            found = as_choice(out)
            if x is not None and found is not None:
                rows = x.reshape(-1, x.shape[-1])
                router = Router(module, args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})
                again = router.route(rows)
                if again is not None and all(torch.equal(a, b) for a, b in zip(again, found, strict=True)):
                    router.examine(rows, out[0], *found)
                    self.norms[index] = _weight_of(norm_of.get(x.data_ptr()), x)
                    self.known[index] = router
            for hook in self._hooks[index]:
                hook.remove()
            self._hooks[index] = []

        norms = [child for _, child in decoder_layer.named_children() if hasattr(child, "weight")]
        return [
            *(norm.register_forward_hook(norm_called) for norm in norms),
            router.register_forward_hook(router_called, with_kwargs=True),
        ]


def as_choice(out: Any) -> tuple[Tensor, Tensor] | None:
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
