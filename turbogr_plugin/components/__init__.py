"""TorchX components that launch the `turbogr` commands, and the check of the profiles that configure them."""

from __future__ import annotations

if __name__ != "turbogr_plugin.components":  # reached through the link at the root, which is for readers only
    raise ImportError(f"`{__name__}` is only a link for readers: import turbogr_plugin.components")
