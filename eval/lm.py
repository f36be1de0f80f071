"""lm-eval's model class around a loaded model, so that an answer depends on its request and on nothing else.

In `exact` and `deterministic` mode requests share the loads of a batch and nothing more (`runtime/batch.py`). What `adaptive`
mode answers depends on what is resident: there every request is served alone, from an empty cache, and its tokens are predicted
as in generation, the context in one pass, then one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from apex_engine.errors import ApexError
from apex_engine.eval.perplexity import decoded_logits, window_logits
from apex_engine.runtime.batch import Together

T = TypeVar("T")
Request = tuple[tuple[str, str], list[int], list[int]]  # lm-eval's: its key, the tokens of context and continuation


class EngineLM(HFLM):
    """`model` as it is set; `adaptive`: its mode. Raises what lm-eval's class raises."""

    def __init__(self, model: PreTrainedModel, adaptive: bool = False, batch_size: int = 1, **options: Any) -> None:
        super().__init__(pretrained=model, batch_size=1 if adaptive else batch_size, **options)
        self._adaptive = adaptive
        self._together = Together(model) if hasattr(model, "apex") and not adaptive else None

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        # Long ones first: what does not fit in memory fails at once, and the time that is left is not underestimated.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        bar = tqdm(total=len(requests), desc="loglikelihoods", disable=disable_tqdm)
        for start in range(0, len(order), self.batch_size):
            some = order[start : start + self.batch_size]
            for i, answer in zip(some, self._run([partial(self.answer, requests[i]) for i in some]), strict=True):
                answers[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
            bar.update(len(some))
        bar.close()
        return [answers[i] for i in range(len(requests))]

    def answer(self, request: Request) -> tuple[float, bool]:
        """Log-likelihood of the continuation, and whether it is the likeliest, token by token."""
        _, context, continuation = request
        if len(continuation) > self.max_length:
            raise ApexError(
                f"a continuation has {len(continuation)} tokens, and --max-length is {self.max_length}: give as much"
            )
        tokens = torch.tensor((context + continuation)[-(self.max_length + 1) :])[None]
        count = len(continuation)
        if self._adaptive:
            self.model.apex.evict_all()
            found = decoded_logits(self.model, tokens, prompt=tokens.shape[1] - count)
        else:
            found = window_logits(self.model, tokens)
        found, targets = found[0, -count:], tokens[0, -count:].to(found.device)
        likelihood = found.gather(-1, targets[:, None]).sum().item()
        return likelihood, bool((found.argmax(-1) == targets).all())

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """`context` `[B, N]`, padded on the left -> `[B, M]`, padded on both sides."""
        masks = options.pop("attention_mask")
        begun = [row[mask.bool()] for row, mask in zip(context, masks, strict=True)]
        room = max_length - context.shape[1]
        generate = super()._model_generate

        def work(row: Tensor) -> Tensor:
            if self._adaptive:
                self.model.apex.evict_all()
            # generate changes the options it is given
            whole = generate(row[None], len(row) + room, stop, attention_mask=torch.ones_like(row)[None], **options)
            return whole[0, len(row) :]

        written = self._run([partial(work, row) for row in begun])
        pad = self.tokenizer.pad_token_id
        width = max(map(len, written))
        ends = torch.full((len(written), width), pad, dtype=context.dtype, device=context.device)
        for end, tokens in zip(ends, written, strict=True):
            end[: len(tokens)] = tokens
        return torch.cat([context, ends], 1)

    def _run(self, work: Sequence[Callable[[], T]]) -> list[T]:
        return self._together.run(work) if self._together else [call() for call in work]
