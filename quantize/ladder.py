"""The twins that the options ask for, of the experts of one source."""

from __future__ import annotations

from apex_engine.checkpoint.twin import Twin
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import MATRICES, RAW, Layout, MatrixFormat
from apex_engine.kernels.packing import GROUP_SIZES
from apex_engine.quantize.forms import FORMS, GROUPED
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source


def make_twins(options: Options, source: Source) -> tuple[Twin, ...]:
    """Fewest bytes first. Raises ApexError where an option does not fit the source."""
    options.check()
    forms = [FORMS[form] for form in options.forms]
    _check_groups(options.group_size, source, {m for form in forms for m in MATRICES if form[m] in GROUPED})
    if "16bit" in options.forms and source.expert_dtype not in RAW:
        raise ApexError(
            f"the experts of {source.folder} are {source.expert_dtype}: a 16-bit HIGH twin would round them. "
            "Say so with --high bfloat16 or --high float16, or use --high int8"
        )
    twins = [Twin.of(_layout(form, options.group_size, source)) for form in forms]
    *lower, high = twins
    for twin in lower:
        if twin.layout.stride >= high.layout.stride:
            raise ApexError(
                f"a LOW twin of {twin.name} has {twin.layout.stride:,} bytes an expert, no fewer than the {high.layout.stride:,} "
                f"of HIGH, {high.name}: choose a LOW form of fewer bits, or a HIGH form of more"
            )
    return tuple(sorted(twins, key=lambda twin: twin.layout.stride))


def _layout(form: dict[str, str], group_size: int, source: Source) -> Layout:
    def matrix(name: str) -> MatrixFormat:
        if name in GROUPED:
            return MatrixFormat(name, group_size)
        return MatrixFormat(source.expert_dtype if name == "16bit" else name)

    return Layout(source.layers[0].shape, matrix(form["up"]), matrix(form["down"]))


def _check_groups(group_size: int, source: Source, grouped: set[str]) -> None:
    """Raises ApexError where the groups do not fill the columns of a `grouped` matrix."""
    layer = source.layers[0]
    columns = {matrix: layer.shape.matrix(matrix)[1] for matrix in MATRICES if matrix in grouped}
    misfits = [f"{matrix} ({k} inputs)" for matrix, k in columns.items() if group_size < 1 or k % group_size]
    if not columns or (not misfits and group_size in GROUP_SIZES):
        return
    fitting = [g for g in GROUP_SIZES if all(k % g == 0 for k in columns.values())]
    where = f" does not divide {' and '.join(misfits)} of {layer.module}" if misfits else " is not usable"
    advice = f"use one of {', '.join(map(str, fitting))}" if fitting else "this model cannot have INT2 twins"
    raise ApexError(f"group size {group_size}{where}: {advice}")
