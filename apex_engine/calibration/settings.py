"""What a calibration measures on, and how."""

from __future__ import annotations

from dataclasses import dataclass

from apex_engine.config import Config
from apex_engine.errors import ApexError, check_seed, flag


@dataclass(frozen=True)
class Settings:
    """What is measured on, and how. Defaults live here only."""

    data: str = "self"  # a file, a dataset, or "self": text that the model writes
    tokens: int = 32768
    length: int = 256  # tokens seen at once
    batch_size: int = 8  # windows a pass
    block: int = 512  # columns whose second moments are taken together
    memory: int | str = Config.memory
    device: str = "cpu"
    seed: int = 0  # of the text that the model writes

    def __post_init__(self) -> None:
        for name in ("tokens", "length", "batch_size", "block"):
            if getattr(self, name) < 1:
                raise ApexError(f"{flag(name)} {getattr(self, name)}: at least 1")
        check_seed(self.seed)
        if self.length < 2:
            raise ApexError(f"--length {self.length}: at least 2")
        if self.tokens < 2 * self.length:
            raise ApexError(f"--tokens {self.tokens}: at least two windows of --length {self.length} are needed")
