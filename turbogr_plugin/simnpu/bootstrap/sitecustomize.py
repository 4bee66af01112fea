"""Gives every Python process of a dry run the simulated npu at the end of its `import torch`.

`turbogr dryrun` puts the folder of this file first on PYTHONPATH, so that Python imports it when it starts: in the
script, in what it spawns and in workers of data loaders. A process that never imports torch pays nothing.

It runs under whatever Python a script may start, hence the old syntax and no import of the package before torch comes.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

FOLDER = "TURBOGR_DRYRUN"  # the environment is the only way to tell all processes of a tree where to report


def _run_hidden_sitecustomize() -> None:
    """Runs the sitecustomize of the environment, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


class _AtTheEndOfTorch:
    """Finds torch by the other finders and appends to its import."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname == "torch_npu":  # before torch, which brings the finder that knows what to do
            import_module("torch")
        elif fullname == "torch":
            sys.meta_path.remove(cls)
        else:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if fullname == "torch_npu":
            return spec
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_start(module: Any) -> None:
            execute(module)
            try:
                import turbogr_plugin  # noqa: F401
            except ImportError:  # it is not installed: the dry run was started from its sources
                sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))
            from turbogr_plugin.simnpu import dryrun_process

            dryrun_process.start(os.environ[FOLDER])

        spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec


if os.environ.get(FOLDER):
    sys.meta_path.insert(0, _AtTheEndOfTorch)
_run_hidden_sitecustomize()
