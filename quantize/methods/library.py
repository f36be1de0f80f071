"""The libraries that only the quantizer needs, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from apex_engine.errors import ApexError


def library(module: str, what: str) -> Any:
    """`module`, for `what` in the words of the command line. Raises ApexError where its package is not installed."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ApexError(f"{what} needs {package}: pip install 'apex-engine[quantize]'") from None
