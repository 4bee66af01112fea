"""One step of a table module's fused optimizer with gradients that come from elsewhere.

fbgemm's modules update their tables in the backward pass of a lookup and offer no other way. So the rows are looked up
once more, each once, and the gradients go back through that lookup: the update is the module's own, whatever it is
built from (fbgemm's kernels, ours, those of an accelerator). Adam and its kin count lookups; they are updated by
`fused_update`, which takes the number of the step.

Left out, refused before training starts (`check_tables`): optimizers with row counters or global weight decay, clipped
gradients, caches and unified memory.
"""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor

from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.sharding.sparse_exchange import SummedRows
from turbogr_plugin.sharding.touched_rows import TableLayout

_BY_LOOKUP = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
_BY_KERNEL = {
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_rowwise_adam",
    EmbOptimType.LAMB: "lamb",
    EmbOptimType.PARTIAL_ROWWISE_LAMB: "partial_rowwise_lamb",
}


def check_tables(tables: Any) -> None:
    """Refuses a table module whose update cannot be carried out apart from its lookup.

    Raises:
        InputError: naming the tables, what they have and what is allowed.
    """
    names = ", ".join(tables.table_names or ["(without names)"])
    allowed = ", ".join(each.name for each in (*_BY_LOOKUP, *_BY_KERNEL))
    if tables.optimizer not in (*_BY_LOOKUP, *_BY_KERNEL):
        raise InputError(
            f"tables {names}: optimizer {tables.optimizer.name} has no exact sum over groups; allowed: {allowed}"
        )
    for attribute, what in (
        ("_used_rowwise_adagrad_with_counter", "row counters"),
        ("_used_rowwise_adagrad_with_global_weight_decay", "global weight decay"),
    ):
        if getattr(tables, attribute):
            raise InputError(
                f"tables {names}: {what} have no exact sum over groups; use Adagrad without, or sync='average'"
            )
    if tables.optimizer_args.gradient_clipping:
        raise InputError(
            f"tables {names}: gradient_clipping is of each lookup, not of the sum over groups; leave it out, or use "
            "sync='average'"
        )
    rounded = (torch.float16, torch.bfloat16)
    if tables.optimizer_args.stochastic_rounding and any(
        weights.dtype in rounded and weights.device.type == "cuda" for weights in tables.split_embedding_weights()
    ):
        raise InputError(
            f"tables {names}: stochastic_rounding on cuda draws other numbers on each replica; switch it off, or use "
            "sync='average'"
        )
    places = {spec[2] for spec in tables.embedding_specs}
    if not places <= {EmbeddingLocation.HOST, EmbeddingLocation.DEVICE}:
        wrong = ", ".join(sorted(place.name for place in places))
        raise InputError(f"tables {names} lie in {wrong}; allowed with sync='exact' are HOST and DEVICE")


def zero_rows_stay(tables: Any) -> bool:
    """Whether a row whose gradient is zero is not changed by the module's optimizer."""
    given = tables.optimizer_args
    return tables.optimizer in _BY_LOOKUP and given.weight_decay == 0.0 and not given.max_norm > 0.0


def update_tables(tables: Any, layout: TableLayout, sums: SummedRows, learning_rate: Tensor, iteration: int) -> None:
    """Carries out one step.

    Args:
        tables: fbgemm's module.
        layout: of its tables.
        sums: ids, each once, and their gradients.
        learning_rate: of this step.
        iteration: of this step, 1 in the first.
    """
    if not sums.ids.numel():
        return
    by_table = _by_table(layout, sums)
    if tables.optimizer in _BY_KERNEL:
        _by_kernel(tables, by_table, float(learning_rate), iteration)
    else:
        _by_lookup(tables, layout, by_table, learning_rate)


def _by_table(layout: TableLayout, sums: SummedRows) -> dict[int, tuple[Tensor, Tensor]]:
    """(rows of the table, gradients) of each touched table, by its number in the module."""
    ids = sums.ids.split(sums.counts)
    found = {}
    for width, block in zip(layout.widths, sums.rows, strict=True):
        parts = block.split([sums.counts[place] for place in width.tables])
        for place, part in zip(width.tables, parts, strict=True):
            if len(part):
                found[layout.order[place]] = (ids[place] - layout.bounds[place], part)
    return found


def _by_kernel(tables: Any, by_table: dict[int, tuple[Tensor, Tensor]], learning_rate: float, iteration: int) -> None:
    given = tables.optimizer_args
    weights, states = tables.split_embedding_weights(), tables.split_optimizer_states()
    for table, (ids, rows) in by_table.items():
        fused_update(
            weights[table],
            states[table],
            ids,
            rows,
            _BY_KERNEL[tables.optimizer],
            learning_rate=learning_rate,
            iteration=iteration,
            eps=given.eps,
            beta1=given.beta1,
            beta2=given.beta2,
            weight_decay=given.weight_decay,
            rowwise_bias_correction=bool(tables.use_rowwise_bias_correction),
        )


def _by_lookup(
    tables: Any, layout: TableLayout, by_table: dict[int, tuple[Tensor, Tensor]], learning_rate: Tensor
) -> None:
    # A table of several features is looked up through its first one.
    features = {table: layout.feature_tables.index(table) for table in by_table}
    order = sorted(by_table, key=lambda table: features[table])
    ids = torch.cat([by_table[table][0] for table in order])
    counts = [0] * len(layout.feature_tables)
    for table in order:
        counts[features[table]] = len(by_table[table][0])
    # One bag holds all ids of a feature, and gives a row for each; of pooled tables each id has a bag of its own.
    bags = max(counts) if layout.pooled else 1
    lengths = torch.tensor(counts, device=ids.device)
    if layout.pooled:
        lengths = (torch.arange(bags, device=ids.device) < lengths[:, None]).long().view(-1)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    index_type = tables.embedding_table_index_type
    kept = _Kept(tables, learning_rate)
    try:
        with torch.enable_grad():
            # `forward` and not the module itself: the hooks are for lookups of the model.
            found = tables.forward(indices=ids.to(index_type), offsets=offsets.to(index_type))
            if layout.pooled:
                grad = torch.zeros_like(found)
                for table in order:
                    begin = sum(layout.dims[each] for each in layout.feature_tables[: features[table]])
                    rows = by_table[table][1]
                    grad[: len(rows), begin : begin + layout.dims[table]] = rows
            else:
                grad = torch.cat([by_table[table][1] for table in order])
            found.backward(grad)
    finally:
        kept.restore()


class _Kept:
    """What a lookup of the module changes or reads besides rows, kept for one that is no step of the model."""

    def __init__(self, tables: Any, learning_rate: Tensor) -> None:
        self._tables = tables
        self._counters = {name: getattr(tables, name).clone() for name in ("iter", "iter_cpu") if hasattr(tables, name)}
        self._values = {name: getattr(tables, name) for name in ("step", "output_dtype", "_indices", "_offsets")}
        self._learning_rate = tables.learning_rate_tensor.clone()
        tables.learning_rate_tensor.copy_(learning_rate)
        tables.output_dtype = SparseType.FP32.as_int()  # gradients have the dtype of the rows, and sums need fp32

    def restore(self) -> None:
        for name, value in self._counters.items():
            getattr(self._tables, name).copy_(value)
        for name, value in self._values.items():
            setattr(self._tables, name, value)
        self._tables.learning_rate_tensor.copy_(self._learning_rate)
