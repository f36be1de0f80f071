"""The forms that a twin of an expert can have: a line each. Imports nothing slow: the command line reads the names.

A form says the format of each matrix (`kernels/layout.py`). Its name is that of the formats, both where they differ; it stands in
the names of the twin's files.
"""

from __future__ import annotations

FORMS = {
    "16bit": {"up": "16bit", "down": "16bit"},  # the source's own dtype, lossless
    "bfloat16": {"up": "bfloat16", "down": "bfloat16"},
    "float16": {"up": "float16", "down": "float16"},
    "int8": {"up": "int8", "down": "int8"},
    "int2": {"up": "int2", "down": "int2"},
    "int2-int3": {"up": "int2", "down": "int3"},
    "int2-int4": {"up": "int2", "down": "int4"},
}
GROUPED = ("int2", "int3", "int4")  # formats whose weights share scales in groups: a method makes them


def is_grouped(form: str) -> bool:
    """Whether a method makes one of its matrices."""
    return any(name in GROUPED for name in FORMS[form].values())


def high_forms() -> tuple[str, ...]:
    """Those that HIGH can have."""
    return tuple(form for form in FORMS if not is_grouped(form))


def low_forms() -> tuple[str, ...]:
    """Those that LOW can have: all but the 16-bit ones."""
    return tuple(form for form, names in FORMS.items() if all(name.startswith("int") for name in names.values()))
