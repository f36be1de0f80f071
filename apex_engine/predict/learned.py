"""Which experts a later layer will choose, from this layer's router input.

    gate     The residual stream changes little from layer to layer, so the later layer's router is asked with the input of
             this one (MoE-APEX, layer level).
    norm     The same. A router's input is normalised with the norm weight of its own layer: this layer's is divided out and the
             later one's multiplied in.
    learned  Begins as "norm", with a copy of the router whose weights W follow what the model does: a token's inputs x of this
             layer and x' of the later one, the router's own weights G, and

                 W += RATE (G x' - W x) x^T / (x^T x)        (normalised least mean squares)

             The first layer has none before it: it is predicted from the token's embedding, normalised as a norm would.

A router that chooses the largest of logits linear in its input, by a softmax, is asked here, in numpy: every operation of torch
lets other threads run Python, and while a token is decoded those are the loader's. Others (sigmoid, biased, grouped) are asked
themselves, with W in the place of their weights, so that they choose as they do; the few whose logits are not linear are asked
with the corrected input and never learn. One layer is asked at a time: the walk of the engine stops at the first layer with a
missing expert, mostly the next one, so that asking p layers at once would cost more than it saves.

Routers, their extra arguments and norms are found while the first pass runs. A layer whose router cannot be asked this way, or
does not choose what it chose then, is not predicted; `Predictor.unknown` names it.

Letters: T tokens, K chosen experts a token, H hidden, E experts.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

EMBEDDING = -1  # the layer before the first
RATE = 0.3
Choice = tuple[NDArray[np.float32], NDArray[np.int64]]  # gate weights up to a factor, and experts: [T, K]


class Predictor:
    """The routers of all MoE layers, in order."""

    def __init__(self, layers: list[tuple[nn.Module, nn.Module]], kind: str) -> None:
        """`layers`: for each MoE layer, the decoder layer and the MoE block in it. `kind`: "gate", "norm" or "learned"."""
        self.kind = kind
        self._known: list[_Layer | None] = [None] * len(layers)
        self._norms: list[Tensor | None] = [None] * len(layers)  # weights [H]
        self._hooks: list[list[Any]] = [
            self._find(i, decoder_layer, block) for i, (decoder_layer, block) in enumerate(layers)
        ]
        self._scale: dict[tuple[int, int], Tensor] = {}
        self._seen: list[tuple[int, Tensor]] = []  # layers and their inputs, to be learned from
        self._questions: list[dict[int, _Question]] = [{} for _ in layers]  # about each layer, by whose input asks

    @property
    def ready(self) -> bool:
        """Whether a pass has shown the routers of all layers."""
        return not any(self._hooks)

    @property
    def unknown(self) -> list[int]:
        """Layers that are not predicted, once `ready`."""
        return [i for i, layer in enumerate(self._known) if layer is None]

    def predict(self, now: int, later: int, x: Tensor) -> Choice | None:
        """Router input `[T, H]` of layer `now`, or embeddings for `EMBEDDING`, -> gate weights and choice `[T, K]` of layer
        `later`; None where unknown."""
        layer = self._known[later]
        if layer is None:
            return None
        if now == EMBEDDING:
            x = x * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)
        if not layer.linear:
            return _in_numpy(layer.route(x * self._correction(now, later, x)))
        questions = self._questions[later]
        if now not in questions:
            questions[now] = _Question(layer, self._correction(now, later, x))
        return questions[now].ask(x)

    def watch(self, layer: int, x: Tensor) -> None:
        """`layer` has got this router input `[1, H]`, and may have been predicted for this token."""
        if self.kind == "learned":
            self._seen.append((layer, x))

    def learn(self) -> None:
        """Follow what was watched, where it was predicted: when there is time, and at the end of a token."""
        for layer, x in self._seen:
            known, questions = self._known[layer], [q for q in self._questions[layer].values() if q.asked is not None]
            if known is not None and questions:
                logits = linear(x, known.router.weight.to(x.dtype))[0].float().cpu().numpy()
                for question in questions:
                    question.learn(logits)
        self._seen.clear()

    def _correction(self, now: int, later: int, x: Tensor) -> Tensor:
        """What the inputs `x` of `now` are multiplied by to be like those of `later`: `[H]`."""
        if (now, later) not in self._scale:
            ones = x.new_ones(x.shape[1])
            if self.kind == "gate":
                return ones
            mine, its = ones if now == EMBEDDING else self._norms[now], self._norms[later]
            self._scale[now, later] = ones if mine is None or its is None else its / mine
        return self._scale[now, later]

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
            found = _as_choice(out)
            if x is not None and found is not None:
                layer = _Layer(module, args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})
                again = layer.route(x.reshape(-1, x.shape[-1]))
                if again is not None and all(torch.equal(a, b) for a, b in zip(again, found, strict=True)):
                    layer.examine(x.reshape(-1, x.shape[-1]), out[0], *found)
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

    def __init__(self, router: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.router, self._args, self._kwargs = router, args, kwargs
        self.linear = False  # its logits are its `weight` times its input, with a `bias` or without
        # Its choice are so many of the largest logits, and the gate weights go like their exponentials; 0: it chooses otherwise.
        self.largest = 0

    def route(self, x: Tensor, router: Any = None) -> tuple[Tensor, Tensor] | None:
        # Past the module's hooks: a user who records router logits wants the real ones only.
        return _as_choice((router or self.router).forward(x, *self._args, **self._kwargs))

    @torch.no_grad()
    def examine(self, x: Tensor, logits: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Find out what kind of router it is from what it made of `x` `[T, H]`."""
        weight, bias = getattr(self.router, "weight", None), getattr(self.router, "bias", None)
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


class _Question:
    """A layer's router as it is asked with the input of another layer."""

    def __init__(self, layer: _Layer, correction: Tensor) -> None:
        self._layer = layer
        weight, bias = layer.router.weight, getattr(layer.router, "bias", None)
        self._weight = (weight.detach().float() * correction.float()).cpu().numpy()  # W: [E, H]
        self._bias = 0.0 if bias is None else bias.detach().float().cpu().numpy()
        self._router: Any = None  # with these weights
        self.asked: NDArray[np.float32] | None = None  # x of the token's prediction, [H]

    def ask(self, x: Tensor) -> Choice | None:
        if len(x) == 1:
            self.asked = x[0].float().cpu().numpy().copy()
            if self._layer.largest:
                # Not by BLAS, which would take threads for it.
                logits = np.einsum("eh,h->e", self._weight, self.asked) + self._bias
                chosen = np.argsort(-logits)[: self._layer.largest]
                return np.exp(logits[chosen] - logits[chosen[0]])[None], chosen[None]
        if self._router is None:
            self._router = copy.copy(self._layer.router)
            weight = torch.from_numpy(self._weight).to(self._layer.router.weight)
            own = nn.Parameter(weight, requires_grad=False)
            self._router._parameters = {**self._router._parameters, "weight": own}
        return _in_numpy(self._layer.route(x, self._router))

    def learn(self, logits: NDArray[np.float32]) -> None:
        """`logits` `[E]` of the layer, without bias, for the token that was asked about."""
        x, self.asked = self.asked, None
        assert x is not None
        error = logits - np.einsum("eh,h->e", self._weight, x)
        self._weight += np.outer(error, x * (RATE / max(float(x @ x), 1e-6)))
        self._router = None


def _as_choice(out: Any) -> tuple[Tensor, Tensor] | None:
    """(gate weights, choice) of what a router returns: (logits, weights, indices) in transformers."""
    if isinstance(out, tuple) and len(out) == 3 and all(isinstance(part, Tensor) for part in out):
        _, weights, chosen = out
        if weights.shape == chosen.shape and not chosen.is_floating_point():
            return weights, chosen
    return None


def _in_numpy(choice: tuple[Tensor, Tensor] | None) -> Choice | None:
    return (choice[0].float().cpu().numpy(), choice[1].cpu().numpy()) if choice else None


def _weight_of(norm: nn.Module | None, x: Tensor) -> Tensor | None:
    """What a norm multiplies with, whatever it adds to its weight: its answer to an input of mean 0 and variance 1."""
    if norm is None:
        return None
    signs = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    signs[1::2] = -1
    scale = type(norm).forward(norm, signs[None])[0] * signs
    return scale if bool((scale != 0).all()) else None
