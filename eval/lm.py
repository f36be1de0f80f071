"""lm-eval's own model class around a loaded model, and what `adaptive` mode needs beyond it.

In `exact` and `deterministic` mode an answer depends on its request alone, so lm-eval batches requests as with any model. What
`adaptive` mode answers depends on what is resident: there every request is served alone, from an empty cache, and its tokens are
predicted as in generation: the context in one pass, then one token at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from apex_engine.eval.perplexity import decoded_logits


class OneByOne(HFLM):
    """Requests one at a time, each from an empty cache."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(pretrained=model, **{**options, "batch_size": 1})

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        answers = []
        for key, context, continuation in tqdm(requests, desc="one by one", disable=disable_tqdm):
            tokens = torch.tensor((context + continuation)[-(self.max_length + 1) :])[None]
            count = len(continuation)
            self.model.apex.evict_all()
            found = decoded_logits(self.model, tokens, prompt=tokens.shape[1] - count)[0, -count:]
            targets = tokens[0, -count:].to(found.device)
            likelihood = found.gather(-1, targets[:, None]).sum().item()
            answers.append((likelihood, bool((found.argmax(-1) == targets).all())))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
        return answers

    def _model_generate(self, *args: Any, **kwargs: Any) -> Tensor:
        self.model.apex.evict_all()
        return super()._model_generate(*args, **kwargs)
