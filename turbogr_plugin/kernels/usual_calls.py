"""A small call of each dispatched operator, as a model makes it: what `turbogr doctor` asks `dispatch.explain` about.

Left out: unusual dtypes and sizes, which an implementation may refuse; ask `explain` about the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.kernels.fuxi_attention import fuxi_attention
from turbogr_plugin.kernels.gated_norm import gated_norm
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.jagged_lookup import jagged_lookup
from turbogr_plugin.kernels.jagged_unique import jagged_unique
from turbogr_plugin.kernels.output_projection import output_projection
from turbogr_plugin.kernels.uvqk_projection import uvqk_projection

_ROWS, _TOKENS, _HEADS, _DIM = 2, 8, 2, 32
_WIDTH = _HEADS * _DIM


def usual_calls(device: torch.device) -> Mapping[str, Callable[[], Any]]:
    """Each dispatched operator by name, called without arguments with float32 tensors on `device`."""
    jagged = torch.zeros(_TOKENS, _HEADS, _DIM, device=device)
    flat, square = jagged.flatten(1), torch.zeros(_WIDTH, _WIDTH, device=device)
    ones = torch.ones(_WIDTH, device=device)
    offsets = torch.arange(_ROWS + 1, device=device) * (_TOKENS // _ROWS)
    attention: dict[str, Any] = {
        "alpha": 1.0,
        "scale": 1.0,
        "timestamps": torch.arange(_TOKENS, device=device),
        "time_bias": torch.zeros(128, device=device),
        "position_bias": torch.zeros(_TOKENS, device=device),
        "host_offsets": [row * (_TOKENS // _ROWS) for row in range(_ROWS + 1)],
    }
    ids = torch.arange(_TOKENS, device=device)
    table, state = torch.zeros(_TOKENS, _DIM, device=device), torch.zeros(_TOKENS, device=device)
    return {
        "hstu_attention": lambda: hstu_attention(jagged, jagged, jagged, offsets, **attention),
        "fuxi_attention": lambda: fuxi_attention(jagged, jagged, jagged, offsets, **attention),
        "gated_norm": lambda: gated_norm(flat, flat, ones, ones),
        "uvqk_projection": lambda: uvqk_projection(flat, square.repeat(4, 1), [_WIDTH] * 4, norm_weight=ones),
        "output_projection": lambda: output_projection(flat, square, flat),
        "jagged_lookup": lambda: jagged_lookup(table, ids, offsets, rows=[_TOKENS // 2] * 2, dim=_DIM),
        "jagged_unique": lambda: jagged_unique(ids, offsets),
        "coalesce_rows": lambda: coalesce_rows(ids, table),
        "fused_update": lambda: fused_update(table, state, ids, table, "rowwise_adagrad", learning_rate=0.1),
    }
