"""Tells transformers of apex checkpoints, when it is there to be told.

`import apex_engine` promises that transformers loads apex checkpoints from then on: `from_pretrained`, `pipeline`, lm-eval. What
does it is `apex_engine.runtime.hook`, which needs transformers and torch, several seconds of imports: too much for `--help`, for
reading a manifest, or for the bit packing. But nobody can load a model before transformers' `modeling_utils` has been imported,
whose `from_pretrained` asks which quantization methods there are. So the promise is kept there:

- where `modeling_utils` is imported already, the hook is imported at once;
- else a finder waits at the front of `sys.meta_path`. It finds what the other finders find, and has the hook imported as soon as
  `modeling_utils` has been executed, before its importer goes on. Then it goes.

Not earlier, as after `transformers.quantizers.auto`, which holds the table of methods: `modeling_utils` imports that in its own
first lines, and the hook needs classes which `modeling_utils` has not made by then.

An import of `modeling_utils` that fails leaves the finder where it is, for the next try. Of threads that import it at once, the
lock of imports lets one execute it, and the others see it with the hook in place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AWAITED = "transformers.modeling_utils"
HOOK = "apex_engine.runtime.hook"


def register() -> None:
    """Import the hook now, or right after transformers' modeling_utils."""
    finder = Awaiting()
    sys.meta_path.insert(0, finder)
    if AWAITED in sys.modules:  # looked up last: another thread may have begun to import it
        finder.arrived()


class Awaiting(MetaPathFinder):
    """Finds the awaited module as others do, and hears when it has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and not isinstance(finder, Awaiting) else None
            if spec:
                if spec.loader:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def arrived(self) -> None:
        import_module(HOOK)
        # A new list, since another thread may be going through the old one, and would miss a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


class _Loader(Loader):
    """Loads a module as `inner` does, and tells the finder. The module itself sees `inner` only."""

    def __init__(self, inner: Loader, finder: Awaiting) -> None:
        self._inner, self._finder = inner, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._finder.arrived()
