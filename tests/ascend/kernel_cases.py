"""Every kernel at every tile shape of the product's table, as something to compile: name, SoC, dtype, tile.

Types of arguments follow from their names, as the launches of `turbogr_plugin.kernels.triton` give them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch

from tests.ascend.lowering import Kernel
from turbogr_plugin.kernels.triton import fuxi_attention_kernels as fuxi
from turbogr_plugin.kernels.triton import gated_norm_kernels as norm
from turbogr_plugin.kernels.triton import jagged_attention_kernels as hstu
from turbogr_plugin.kernels.triton import tiles

SOCS = ("Ascend910B3", "Ascend910_9392", "Ascend950PR_9589")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ATTENTION: dict[tiles.Pass, Any] = {
    "forward": hstu.forward_kernel,
    "query_gradient": hstu.query_gradient_kernel,
    "key_value_gradient": hstu.key_value_gradient_kernel,
    "table_gradient": hstu.table_gradient_kernel,
    "fuxi_forward": fuxi.forward_kernel,
    "fuxi_key_value_gradient": fuxi.key_value_gradient_kernel,
    "fuxi_table_gradient": fuxi.table_gradient_kernel,
}
assert set(ATTENTION) == set(get_args(tiles.Pass))

_FLOATS = {"alpha", "scale", "bias_scale", "eps", "factor"}
_INTEGER_TENSORS = {"Rows", "Items", "ItemCount", "Counters"}
_FLOAT_TENSORS = {
    "Times",
    "Borders",
    "TimeTable",
    "PositionTable",
    "TimeSums",
    "PositionSums",
    "WeightSums",
    "BiasSums",
}
# Both biases, every mask: the most that a kernel has to hold at once.
_EVERYTHING = {"BUCKETS": 128, "BUCKET_LANES": 128, "POSITIONS": 1024, "TARGETS": True, "CONTEXT": True, "WINDOW": True}
# Other masks and biases.
VARIANTS = {
    "plain": {"BUCKETS": 0, "BUCKET_LANES": 16, "POSITIONS": 0, "TARGETS": False, "CONTEXT": False, "WINDOW": False},
    "not causal": {"CAUSAL": False, "POSITIONS": 0},
    "decay": {"BUCKETS": 0, "BUCKET_LANES": 16},
}


@dataclass(frozen=True)
class Case:
    """One kernel at one tile shape, to be scheduled for every SoC."""

    name: str
    kernel: Kernel


def _type(name: str, dtype: str) -> str:
    if name in _FLOATS:
        return "fp32"
    if name in _INTEGER_TENSORS:
        return "*i32"
    if name in _FLOAT_TENSORS:
        return "*fp32"
    return f"*{dtype}" if name[0].isupper() else "i32"


def kernel(function: Any, dtype: str, **constants: Any) -> Kernel:
    """A kernel with the constants it knows of those given."""
    known = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {name: _type(name, dtype) for name in function.arg_names if name not in known}
    return Kernel(function, signature, known)


def attention_kernel(which: tiles.Pass, dtype: str, tile: tiles.Tile, dim: int, **constants: Any) -> Kernel:
    """An attention kernel with both biases and every mask, unless `constants` say otherwise."""
    shapes = {"D": dim, "E": dim, "BD": dim, "BE": dim, "BM": tile.queries, "BN": tile.keys, "BT": tile.keys}
    flags = {"CAUSAL": True, "TILED": True, "PRECISION": "ieee", **_EVERYTHING}
    return kernel(ATTENTION[which], dtype, **{**shapes, **flags, **constants})


def attention_cases() -> Iterator[Case]:
    """Every entry of the table of tiles, and the other masks and biases at one of them."""
    for which in get_args(tiles.Pass):
        for dtype in DTYPES:
            for tile, dim in tiles.ascend_tiles(which, DTYPES[dtype]):
                name = f"{which}-{dtype}-{tile.queries}x{tile.keys}-dim{dim}"
                yield Case(name, attention_kernel(which, dtype, tile, dim))
        for variant, constants in VARIANTS.items():
            if (variant == "decay") != which.startswith("fuxi") or (which, variant) == ("table_gradient", "plain"):
                continue
            tile, dim = tiles.ascend_tiles(which, torch.bfloat16)[0]
            yield Case(f"{which}-bf16-{variant}", attention_kernel(which, "bf16", tile, dim, **constants))


def norm_cases() -> Iterator[Case]:
    """gated_norm at every shape of tile: narrow groups, the width of a model, the widest."""
    for direction, function in (("forward", norm.forward_kernel), ("backward", norm.backward_kernel)):
        for dtype in DTYPES:
            for rows, width in tiles.ascend_norm_tiles():
                flags = {"CENTERED": True, "WEIGHTED": True, "BIASED": True}
                name = f"gated_norm_{direction}-{dtype}-{rows}x{width}"
                yield Case(name, kernel(function, dtype, ROWS=rows, WIDTH=width, **flags))
        rows, width = tiles.ascend_norm_tiles()[0]
        flags = {"CENTERED": False, "WEIGHTED": False, "BIASED": False}
        yield Case(f"gated_norm_{direction}-bf16-rms", kernel(function, "bf16", ROWS=rows, WIDTH=width, **flags))


def all_cases() -> list[Case]:
    """What the gate compiles."""
    return [*attention_cases(), *norm_cases()]
