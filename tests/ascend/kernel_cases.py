"""Every kernel at every tile shape of the product's table, as something to compile: name, SoC, dtype, tile.

Types of arguments follow from their names, as the launches of `turbogr_plugin.kernels.triton` give them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from tests.ascend.lowering import Kernel
from turbogr_plugin.kernels.triton import coalesce_rows_kernels as coalesce
from turbogr_plugin.kernels.triton import fused_update_kernels as update
from turbogr_plugin.kernels.triton import fuxi_attention_kernels as fuxi
from turbogr_plugin.kernels.triton import gated_norm_kernels as norm
from turbogr_plugin.kernels.triton import jagged_attention_kernels as hstu
from turbogr_plugin.kernels.triton import jagged_lookup_kernels as lookup
from turbogr_plugin.kernels.triton import row_tiles, targets, tiles

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
_FLOATS |= {"rate", "beta1", "beta2", "correction1", "correction2", "weight_decay"}
_INTEGER_TENSORS = {"Rows", "Items", "ItemCount", "Counters", "OutOffsets", "GradOffsets", "Wanted"}
_LONG_TENSORS = {"Ids", "Offsets", "TableBegin", "TableRows", "State0Begin", "State1Begin", "FirstRow", "Shares"}
_LONG_TENSORS |= {"Order", "Begins", "Heads", "Feature", "Bag"}
_FLOAT_TENSORS = {
    "Times",
    "Borders",
    "TimeTable",
    "PositionTable",
    "TimeSums",
    "PositionSums",
    "WeightSums",
    "BiasSums",
    "IdWeights",
    "State0",
    "State1",
    "Rate",
    "RowGradients",
    "SecondGrad",
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
    if name in _LONG_TENSORS:
        return "*i64"
    if name in _FLOAT_TENSORS:
        return "*fp32"
    return f"*{dtype}" if name[0].isupper() else "i32"


def kernel(function: Any, dtype: str, types: Mapping[str, str] | None = None, **constants: Any) -> Kernel:
    """A kernel with the constants it knows of those given, and `types` in place of its arguments' usual ones."""
    known = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {name: _type(name, dtype) for name in function.arg_names if name not in known}
    for name, given in (types or {}).items():
        if name in signature:
            signature[name] = given
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
            for tile, dim in dict.fromkeys(x for soc in SOCS for x in tiles.ascend_tiles(which, DTYPES[dtype], soc)):
                name = f"{which}-{dtype}-{tile.queries}x{tile.keys}-dim{dim}"
                yield Case(name, attention_kernel(which, dtype, tile, dim))
        for variant, constants in VARIANTS.items():
            if (variant == "decay") != which.startswith("fuxi") or (which, variant) == ("table_gradient", "plain"):
                continue
            tile, dim = tiles.ascend_tiles(which, torch.bfloat16, SOCS[0])[0]
            yield Case(f"{which}-bf16-{variant}", attention_kernel(which, "bf16", tile, dim, **constants))
        tile, dim = tiles.ascend_tiles(which, torch.bfloat16, SOCS[0])[0]
        odd = attention_kernel(which, "bf16", tile, dim, types={"TimeTable": "*bf16"}, D=25, E=50)
        yield Case(f"{which}-bf16-tables-in-bf16-dims-25-50", odd)


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
        # What autocast makes: activations in bfloat16 beside parameters in float32.
        flags, wide = {"CENTERED": True, "WEIGHTED": True, "BIASED": True}, {"Weight": "*fp32", "Bias": "*fp32"}
        rows, width = tiles.ascend_norm_tiles()[-1]
        mixed = kernel(function, "bf16", types=wide, ROWS=rows, WIDTH=width, **flags)
        yield Case(f"gated_norm_{direction}-bf16-parameters-in-fp32", mixed)


# The kernels of the lookup, as many rows at a time as each takes, and what else is constant.
_FUSED = {"OPTIMIZER": "rowwise_adagrad", "DECAY": 1, "RATE_ON_DEVICE": False}
_BAGS = {"POOLED": True, "MEAN": True, "WEIGHTED": True, "SPLIT": False}
_SEQUENCE = {"POOLED": False, "MEAN": False, "WEIGHTED": False, "SPLIT": False}
LOOKUP: dict[str, tuple[Any, dict[str, Any]]] = {
    "lookup_rows": (lookup.sequence_kernel, {}),
    "lookup_bags": (lookup.pooled_kernel, _BAGS),
    "lookup_update": (lookup.update_kernel, {**_FUSED, **_BAGS}),
    "coalesce": (coalesce.coalesce_kernel, {}),
    "row_update": (update.update_kernel, _FUSED),
}
_LOOKUP_VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lookup_update-sequence": (lookup.update_kernel, {**_FUSED, **_SEQUENCE}),
    "lookup_update-two_dtypes": (lookup.update_kernel, {**_FUSED, **_SEQUENCE, "SPLIT": True}),
    "lookup_dense_gradient": (lookup.dense_gradient_kernel, _BAGS),
    "lookup_id_weights": (lookup.id_weights_gradient_kernel, _BAGS),
    "row_update-sgd": (update.update_kernel, {**_FUSED, "OPTIMIZER": "sgd", "RATE_ON_DEVICE": True}),
    "row_update-adagrad": (update.update_kernel, {**_FUSED, "OPTIMIZER": "adagrad"}),
    "row_update-adam": (update.update_kernel, {**_FUSED, "OPTIMIZER": "adam"}),
    "lookup_update-adam": (lookup.update_kernel, {**_FUSED, **_BAGS, "OPTIMIZER": "adam"}),
}
ASCEND = targets.Target(True, SOCS[0], 20, 40)
_MANTISSA = {"fp32": 23, "fp16": 10, "bf16": 7}


def lookup_kernel(function: Any, dtype: str, width: int, **constants: Any) -> Kernel:
    """A kernel of the lookup for tables of so many columns; those that are not float32 are rounded stochastically."""
    many = function is lookup.sequence_kernel
    tile = row_tiles.lookup_tile(width) if many else row_tiles.sum_tile(ASCEND, width)
    shapes = {"ROWS": tile.rows, "WIDTH": tile.width, "UNIT": 4, "DROPPED": 23 - _MANTISSA[dtype]}
    return kernel(function, dtype, **{**shapes, **constants})


def lookup_cases() -> Iterator[Case]:
    """The kernels of the lookup in float32 at every width, the widest that is rounded, other dtypes and optimizers."""
    for name, (function, constants) in LOOKUP.items():
        for width in row_tiles.ascend_widths():
            yield Case(f"{name}-fp32-{width}", lookup_kernel(function, "fp32", width, **constants))
        for dtype in ("fp16", "bf16"):
            width = row_tiles.WIDEST_ROUNDED
            yield Case(f"{name}-{dtype}-{width}", lookup_kernel(function, dtype, width, **constants))
    for name, (function, constants) in _LOOKUP_VARIANTS.items():
        yield Case(f"{name}-fp16-128", lookup_kernel(function, "fp16", 128, **constants))


def all_cases() -> list[Case]:
    """What the gate compiles."""
    return [*attention_cases(), *norm_cases(), *lookup_cases()]
