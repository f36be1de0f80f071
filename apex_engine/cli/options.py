"""The engine's options on the command line, made from the fields of `Config`.

`python -m apex_engine.cli.options` prints the README's tables of them.

Nothing heavy is imported before a command has read its arguments: `--help` takes no model.
"""

from __future__ import annotations

import argparse
from dataclasses import Field
from typing import TYPE_CHECKING, Any

from apex_engine.config import ADVANCED, BASIC, DTYPES, SYSTEMS, Config, command_line
from apex_engine.errors import ApexError, flag

if TYPE_CHECKING:
    import torch

GROUPS = {BASIC: "engine", ADVANCED: "engine, advanced"}
SYSTEM = (
    "a preset for the options below: apex, MoE-APEX as published; on-demand, what engines without twins do (LRU, HIGH only, no "
    "prefetch)"
)


def add_engine_options(
    p: argparse.ArgumentParser,
    mode: str = Config.mode,
    prefetch: int | str = Config.prefetch,
    dtype: str = "the model's",
) -> argparse._ArgumentGroup:
    """The options of `Config`, and --system, --device and --dtype; what is not given is None. Returns the basic group.

    `mode`, `prefetch`, `dtype`: what the help calls their defaults, where a command has its own.
    """
    own = {"mode": str(mode), "prefetch": str(prefetch)}
    groups = {name: p.add_argument_group(title) for name, title in GROUPS.items()}
    basic = groups[BASIC]
    basic.add_argument("--system", choices=SYSTEMS, help=f"{SYSTEM}; default: default")
    for each in command_line():
        about = each.metadata
        given: dict[str, Any] = {"choices": about["choices"]} if about["choices"] else {"metavar": about["metavar"]}
        text = f"{about['meaning']}; {_default(each, own.get(each.name))}".replace("%", "%%")
        groups[about["group"]].add_argument(flag(each.name), type=about["kind"], help=text, **given)
    basic.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1; default: %(default)s")
    basic.add_argument("--dtype", choices=DTYPES, default="auto", help=f"of the computation; default: {dtype}")
    return basic


def engine_config(args: argparse.Namespace, device: torch.device, **defaults: Any) -> Config:
    """The options that were given, over `defaults`. Raises ApexError."""
    from apex_engine.memory.plan import config_for  # with torch

    names = ("system", *(each.name for each in command_line()))
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "memory" in given and "device_memory" in given:
        raise ApexError("two budgets: --memory is for experts, --device-memory for all there is; drop one")
    config = config_for(device, **{**defaults, **given})
    if config.mode == "exact":
        for name in ("thresholds", "t1", "t2", "first_t1", "low_share"):
            if name in given:
                raise ApexError(f"{flag(name)} has no effect in exact mode, which has no LOW twins: drop it")
    return config


def markdown() -> str:
    """The options as the README shows them, a table for each group."""
    rows: dict[str, list[str]] = {BASIC: [_row("system", SYSTEM, tuple(SYSTEMS), "default")], ADVANCED: []}
    for each in command_line():
        about = each.metadata
        shown = _default(each).removeprefix("default: ")
        rows[about["group"]].append(_row(each.name, about["meaning"], about["choices"], shown))
    head = "| {} | meaning | default |\n|---|---|---|\n"
    return "\n".join(head.format(GROUPS[group]) + "".join(some) for group, some in rows.items())


def _row(name: str, meaning: str, choices: tuple[str, ...], default: str) -> str:
    known = f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""
    return f"| `{flag(name)}` | {meaning}{known} | {default} |\n"


def _default(each: Field[Any], own: str | None = None) -> str:
    """What holds where the option is not given."""
    unset = each.metadata["unset"]
    if own is None and unset.startswith("uncalibrated"):
        return str(unset)
    return f"default: {own or unset or each.default}"


if __name__ == "__main__":
    print(markdown(), end="")
