"""The prompt that a user gave, as text and as tokens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from apex_engine.errors import ApexError, first_line
from apex_engine.quantize.source.names import ALIASES

DEMO_PROMPT = "Rev3:1 And I saw a great"


def read_prompt(args: argparse.Namespace) -> str:
    """From the argument, the file or stdin; one newline at the end, as editors and `echo` write it, is not part of it."""
    if args.prompt is not None and args.file:
        raise ApexError("two prompts: give it as an argument or with --file, not both")
    try:
        if args.file:
            text = args.file.read_text().removesuffix("\n")
        elif args.prompt == "-" or (args.prompt is None and args.model and sys.stdin and not sys.stdin.isatty()):
            text = sys.stdin.read().removesuffix("\n") if sys.stdin else ""
        elif args.prompt is None and not args.model:
            text = DEMO_PROMPT
        else:
            text = args.prompt or ""
        text.encode()
    except (OSError, UnicodeError) as error:
        raise ApexError(f"the prompt cannot be read as UTF-8 text: {error}") from None
    if not text and args.model and not Path(args.model).exists() and args.model not in ALIASES:
        raise ApexError(f"{args.model} is no directory, and there is no prompt: give a checkpoint, then the prompt")
    if not text:
        raise ApexError("no prompt: give it as the second argument, with --file, or on stdin")
    return text


def encode(tokenizer: Any, text: str, raw: bool) -> torch.Tensor:
    """Token ids `[1, N]`."""
    if tokenizer.chat_template and not raw:
        turn = [{"role": "user", "content": text}]
        try:
            encoded = tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # templates are programs
            raise ApexError(f"the chat template failed ({first_line(error)}): --raw goes without it") from None
    else:
        encoded = tokenizer(text, return_tensors="pt")
    return encoded["input_ids"]
