"""Trains generative recommenders with TorchRec: parts for Ascend NPUs, CUDA and CPU that are swapped in one at a time.

Importing the package is cheap: it loads neither torch nor torchrec, fbgemm or Triton, so that the command line and the
launcher answer at once. It re-exports nothing either; each subpackage says in its docstring what it holds.
"""

from __future__ import annotations

__version__ = "0.1.0"
