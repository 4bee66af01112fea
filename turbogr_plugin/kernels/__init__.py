"""The operators: schema, checks and dispatch of each family, with its plain PyTorch reference beside it."""

from __future__ import annotations

if __name__ != "turbogr_plugin.kernels":  # reached through the link at the root, which is for readers only
    raise ImportError(f"`{__name__}` is only a link for readers: import turbogr_plugin.kernels")
