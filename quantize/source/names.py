"""What a user may call a model: a directory, a hub id, or an alias. Imports nothing slow: the command line reads the aliases."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from apex_engine.errors import ApexError, first_line

ALIASES = {
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "phi-moe": "microsoft/Phi-3.5-MoE-instruct",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "olmoe": "allenai/OLMoE-1B-7B-0924-Instruct",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "tiny": str(Path(__file__).resolve().parents[2] / "models" / "tiny-mixtral"),
}


def resolve(source: str) -> Path:
    """The local directory of an alias, a directory or a hub id (downloaded). Raises ApexError."""
    path = Path(source).expanduser()
    if path.is_dir():
        if source in ALIASES:
            raise ApexError(f"{source} is a directory here and an alias too: write ./{source} or {ALIASES[source]}")
        return path
    if path.exists():
        raise ApexError(f"{source} is a file: name the directory that holds config.json and the *.safetensors")
    name = ALIASES.get(source, source)
    if source == "tiny":
        if not Path(name).is_dir():
            raise ApexError("the bundled model comes with a checkout of the repository only: name another model")
        return Path(name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        near = get_close_matches(source, ALIASES, n=1)
        hint = f"did you mean {near[0]}?" if near else "check the path."
        raise ApexError(
            f"{source} is no directory, no hub id (owner/name) and no alias: {hint} Aliases are {', '.join(ALIASES)}"
        )
    return _download(source, name)


def _download(source: str, repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
    try:
        return Path(
            snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["original/*", "consolidated*", "metal/*"])
        )
    except HfHubHTTPError as error:
        raise ApexError(f"the hub refused {repo}: {first_line(error)}") from None
    except Exception:  # the client's network errors share no base class
        at = "" if source == repo else f" (alias of {repo})"
        raise ApexError(
            f"{source}{at} is no local directory, and the hub could not be reached: "
            "go online, or download it elsewhere and give its directory"
        ) from None
