"""Who holds what: planning of the embedding tables over ranks."""

from __future__ import annotations

if __name__ != "turbogr_plugin.sharding":  # reached through the link at the root, which is for readers only
    raise ImportError(f"`{__name__}` is only a link for readers: import turbogr_plugin.sharding")
