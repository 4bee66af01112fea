"""The operators: schema, checks and dispatch of each family, with its implementations in the folders beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "turbogr_plugin.kernels":  # reached through the link at the root, which is for readers only
    raise ImportError(f"`{__name__}` is only a link for readers: import turbogr_plugin.kernels")

if TYPE_CHECKING:
    from turbogr_plugin.kernels.dispatch import explain as explain


def __getattr__(name: str) -> Any:
    if name == "explain":  # on first use: it imports torch, which this package must not
        from turbogr_plugin.kernels.dispatch import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
