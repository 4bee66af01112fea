"""When things run: how TorchRec's train pipelines overlap their stages on an accelerator."""

from __future__ import annotations
