"""Runs Mixture-of-Experts language models that do not fit in fast memory.

Importing this package registers the quantization method `apex` with transformers, so that
`AutoModelForCausalLM.from_pretrained` returns the model of an apex checkpoint; `load` does the same with run-time options.
"""

from pathlib import Path

_project = Path(__file__).resolve().parent.parent / "pyproject.toml"
if _project.is_file() and 'name = "apex-engine"' in _project.read_text():
    __path__.append(str(_project.parent))  # in a checkout kernels/, quantize/ and eval/ lie beside this folder

from apex_engine.config import Config
from apex_engine.errors import ApexError
from apex_engine.runtime.engine import Engine
from apex_engine.runtime.hook import load

__all__ = ["ApexError", "Config", "Engine", "load"]
