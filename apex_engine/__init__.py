"""Runs Mixture-of-Experts language models that do not fit in fast memory.

Importing this package makes `apex` a quantization method of transformers, so that `AutoModelForCausalLM.from_pretrained` returns
the model of an apex checkpoint; `load` does the same with run-time options. It loads neither torch nor transformers: they come
with the first use of a name below.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_project = Path(__file__).resolve().parent.parent / "pyproject.toml"
if _project.is_file() and 'name = "apex-engine"' in _project.read_text():
    __path__.append(str(_project.parent))  # in a checkout kernels/, quantize/ and eval/ lie beside this folder

from apex_engine.runtime.registration import register

if TYPE_CHECKING:
    from apex_engine.config import Config
    from apex_engine.errors import ApexError
    from apex_engine.runtime.engine import Engine
    from apex_engine.runtime.hook import load

__all__ = ["ApexError", "Config", "Engine", "load"]
_HOMES = {"ApexError": "errors", "Config": "config", "Engine": "runtime.engine", "load": "runtime.hook"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
