"""The lazy hook: what this package changes in TorchRec is changed when TorchRec is imported, and not before.

`install` is the entry point that torch calls at the end of `import torch` (group `torch.backends`), and what
`import turbogr_plugin` calls. It imports nothing, puts one finder before the others, and takes it away when TorchRec
has come. A process that never imports TorchRec pays for this module alone, and `import torch` cannot fail by it: what
goes wrong becomes a warning. TURBOGR_AUTOLOAD=0 turns it off; `turbogr_plugin.register()` works nevertheless.

The end of an import is where importlib sets `__spec__._initializing` to False. That also serves the order
`import torchrec` -> `import torch` -> `install`, where TorchRec's loader is already at work and cannot be wrapped.

Left out: the device. torch_npu names and registers it by an entry point of its own; the order of the two is not
defined, so nothing here may need it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

HOST = "torchrec"


class _WatchedSpec(ModuleSpec):
    """The spec of a module that is being imported; an ordinary ModuleSpec again when that has ended."""

    def __setattr__(self, name: str, value: object) -> None:
        ended = name == "_initializing" and not value
        if ended and HOST in sys.modules:  # else TorchRec's import has failed, and the next one is watched again
            _host_has_come(self)  # before other threads may go on with what they import from TorchRec
        super().__setattr__(name, value)
        if ended:
            self.__class__ = ModuleSpec  # type: ignore[assignment]


class _Finder:
    """Finds TorchRec by the other finders and marks its spec."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A target is given by importlib.reload, which runs TorchRec's __init__ again but no module that is adapted.
        if fullname != HOST or target is not None:
            return None
        for finder in sys.meta_path:
            if finder is _Finder or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, None)
            if spec is not None:
                _watch(spec)
                return spec
        return None


def install() -> None:
    """Installs the hook, once; registers at once where TorchRec is already imported. Never raises."""
    if os.environ.get("TURBOGR_AUTOLOAD", "1") == "0":
        return
    try:
        host = sys.modules.get(HOST)
        if host is None:
            if _Finder not in sys.meta_path:
                sys.meta_path.insert(0, _Finder)
        elif getattr(host.__spec__, "_initializing", False):
            assert host.__spec__ is not None
            _watch(host.__spec__)
        else:
            _host_has_come()
    except Exception as error:
        _warn(f"turbogr_plugin will not adapt TorchRec: {error!r}")


def _watch(spec: ModuleSpec) -> None:
    if type(spec) is ModuleSpec:
        spec.__class__ = _WatchedSpec
    elif type(spec) is not _WatchedSpec:
        _warn(f"turbogr_plugin will not adapt TorchRec: its import runs under a {type(spec).__qualname__}")


def _host_has_come(ended: ModuleSpec | None = None) -> None:
    """Registers, and warns of what was refused. Never raises.

    A module of this package may be what imports TorchRec first. Registration imports such modules, so it waits until
    they are whole.
    """
    try:
        for name, module in list(sys.modules.items()):
            spec: ModuleSpec | None = getattr(module, "__spec__", None)
            if spec is None or spec is ended or not name.startswith("turbogr_plugin."):
                continue
            if getattr(spec, "_initializing", False):
                _watch(spec)
                return
        if _Finder in sys.meta_path:
            sys.meta_path.remove(_Finder)
        from turbogr_plugin.registration import register

        refused = register().refused
        if refused:
            items = "".join(f"\n  {outcome.name}: {outcome.reason}" for outcome in refused)
            _warn(f"turbogr_plugin has refused to adapt:{items}")
    except Exception as error:
        _warn(f"turbogr_plugin has not adapted TorchRec: {error!r}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:  # python -W error: a warning must not make the import of somebody else's package fail either
        print(message, file=sys.stderr)
