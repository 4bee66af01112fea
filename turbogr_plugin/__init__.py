"""Trains generative recommenders with TorchRec: parts for Ascend NPUs, CUDA and CPU that are swapped in one at a time.

Importing the package installs the lazy hook of backend/autoload.py and nothing else: TorchRec is adapted when it is
imported (at once if it already is). The import loads neither torch nor torchrec, fbgemm or Triton, so that the command
line and the launcher answer at once. Besides `register` it re-exports nothing; each subpackage says in its docstring
what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

from turbogr_plugin.backend.autoload import install as _install

if TYPE_CHECKING:
    from turbogr_plugin.registration import RegistrationReport


def register() -> RegistrationReport:
    """Adapts TorchRec now instead of when it is imported, and says what was done; see `registration.register`.

    Raises:
        ImportError: torchrec cannot be imported.
    """
    from turbogr_plugin.registration import register as register_now

    return register_now()


_install()
