"""The windows of tokens that a calibration reads: of a text, or of what the model writes itself.

Letters: W windows, N tokens a window.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, set_seed

from apex_engine.calibration.search import Advance
from apex_engine.calibration.settings import Settings
from apex_engine.cli.checkpoint import read_tokenizer
from apex_engine.cli.console import progress
from apex_engine.errors import ApexError
from apex_engine.eval.texts import token_ids, windows


def rows_of(model: PreTrainedModel, folder: Path, text: str | None, settings: Settings) -> tuple[Tensor, str]:
    """Token ids `[W, N]` of `text`, or of what the model writes; and what they are."""
    count, length = settings.tokens // settings.length, settings.length
    if text is None:
        model.apex.decide("exact")
        with progress("writing text", length - 1) as advance:
            rows = sample(model, count, length, settings.seed, advance)
        return rows, f"text the model wrote itself, seed {settings.seed}"
    tokenizer = read_tokenizer(folder)
    count = min(count, len(token_ids(tokenizer, text)) // length)
    if count < 2:
        raise ApexError(
            f"{settings.data} has fewer than two windows of {length} tokens: lower --length, or take another"
        )
    digest = sha256(text.encode()).hexdigest()[:12]
    return windows(tokenizer, text, count, length), f"{settings.data} (sha256 {digest})"


def sample(model: PreTrainedModel, count: int, length: int, seed: int, advance: Advance) -> Tensor:
    """Token ids `[count, length]` that the model itself writes, at temperature 1, from nothing: text it finds likely.

    All at once, since each step needs nearly all experts, however few the texts. `advance` is told of each step.
    """
    config = model.config.get_text_config()
    start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    start = start[0] if isinstance(start, list) else start
    if start is None:
        raise ApexError("the model has no token that begins a text: give one with --data")

    class Told(StoppingCriteria):
        def __call__(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
            advance(1)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    set_seed(seed)
    begin = torch.full((count, 1), start, device=model.device)
    written: Tensor = model.generate(
        begin,
        attention_mask=torch.ones_like(begin),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
        pad_token_id=start,
        stopping_criteria=[Told()],
    )
    return written.cpu()
