"""Our lookup in fbgemm's table modules, where TorchRec has built them: `use_jagged_lookup`.

On `npu` TorchRec ends in our lookup anyway, since the operators of fbgemm are ours there. On CPU fbgemm has its own,
and this is how tables leave them. Each of fbgemm's table modules gets a subclass of its own class, which in its forward
pass puts our operator where fbgemm's forward calls the lookup. The module, its buffers and parameters stay the objects
that they are, so that checkpoints, fused optimizers, DistributedModelParallel and pipelines see no difference.

What changes besides speed, on CPU: tables in bf16, rows returned in bf16, stochastic rounding, weight decay and
`max_norm` as on accelerators (fbgemm's CPU kernels lack the first two and ignore the others), and data-parallel
sequences, which fbgemm pools there by mistake.

Left out, each refused by name: row counters and global weight decay of Adagrad, sparse gradients (OptimType.NONE),
unified memory, caches, SSD and key-value tables. Adam on CPU: fbgemm's module refuses it before it could be ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from turbogr_plugin.kernels.fbgemm_dedup import jagged_unique_indices
from turbogr_plugin.kernels.fbgemm_dense_lookup import dense_embedding_codegen_lookup_function
from turbogr_plugin.kernels.fbgemm_lookup import operator_function
from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS

_OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"split_embedding_codegen_lookup_{name}_function_pt2": operator_function(name) for name in OPTIMIZERS},
    "dense_embedding_codegen_lookup_function": dense_embedding_codegen_lookup_function,
    "jagged_unique_indices": jagged_unique_indices,
}

_OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB,
    EmbOptimType.LARS_SGD,
)
KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
"""TorchRec's compute kernels whose tables our lookup serves: rows in the memory of the device."""


class OurOperators(TorchFunctionMode):
    """While it is entered, calls of fbgemm's operators of lookup and dedup are calls of ours; all others pass.

    A forward pass of fbgemm's module makes about 20 calls of torch's functions, at 1 us each for passing through here.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverloadPacket):
            func = _OPERATORS.get(func.__name__, func)
        return func(*args, **(kwargs or {}))


class JaggedLookupTables(SplitTableBatchedEmbeddingBagsCodegen):
    """fbgemm's tables with a fused optimizer, whose lookup and update are ours."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As fbgemm's, with the same arguments and result."""
        with OurOperators():
            return super().forward(*args, **kwargs)


class JaggedLookupDenseTables(DenseTableBatchedEmbeddingBagsCodegen):
    """fbgemm's tables whose gradient is dense (data-parallel sharding), with our lookup."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As fbgemm's, with the same arguments and result."""
        with OurOperators():
            return super().forward(*args, **kwargs)


def use_jagged_lookup(module: nn.Module) -> int:
    """Puts our lookup into each of fbgemm's table modules in a module, which keep their state and their optimizers.

    Args:
        module: anything that contains them: a sharded module of TorchRec, a DistributedModelParallel, or one of
            fbgemm's modules.

    Returns:
        How many modules have our lookup by this now; those on npu, which have it anyway, do not count.

    Raises:
        ValueError: tables that our lookup does not serve; then nothing is changed.
    """
    for child in _modules(module):
        if isinstance(child, BaseEmbedding):
            _check_kernel(child)
    # On npu the operators that these modules call are ours already.
    found = [tables for tables in table_modules(module) if tables.weights_offsets.device.type != "npu"]
    for tables in found:
        if type(tables) not in (*_OURS, *_OURS.values()):
            raise ValueError(f"{type(tables).__name__} is a subclass of fbgemm's tables, which would lose its forward")
        if isinstance(tables, SplitTableBatchedEmbeddingBagsCodegen):
            _check_optimizer(tables)
    for tables in found:
        # As torch's fully_shard does. Another object would have to be put into the optimizer and the parameters by
        # table, which hold this one; and TorchRec builds it eight calls below the sharder.
        tables.__class__ = _OURS.get(type(tables), type(tables))
    return len(found)


_OURS: dict[type[nn.Module], type[nn.Module]] = {
    SplitTableBatchedEmbeddingBagsCodegen: JaggedLookupTables,
    DenseTableBatchedEmbeddingBagsCodegen: JaggedLookupDenseTables,
}


def table_modules(
    module: nn.Module,
) -> list[SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen]:
    """fbgemm's table modules in a module, with their lookup or with ours."""
    kinds = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)
    return [child for child in _modules(module) if isinstance(child, kinds)]


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """All modules within, also those that TorchRec's sharded modules hold in a list, where `modules()` ends."""
    for child in module.modules():
        yield child
        for lookup in getattr(child, "_lookups", ()):
            yield from _modules(lookup)


def _check_kernel(kernel: BaseEmbedding) -> None:
    """One of TorchRec's modules that hold rows."""
    held = type(getattr(kernel, "_emb_module", None))
    if held not in (*_OURS, *_OURS.values()):
        names = ", ".join(table.name for table in kernel.config.embedding_tables)
        raise ValueError(
            f"tables {names}: {type(kernel).__name__} holds them in {held.__name__}, which has no lookup of ours; "
            f"allowed are the compute kernels {' and '.join(KERNELS)}"
        )


def _check_optimizer(tables: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    names = ", ".join(tables.table_names or ["(without names)"])
    if tables.optimizer not in _OPTIMIZERS:
        allowed = ", ".join(each.name for each in _OPTIMIZERS)
        raise ValueError(f"tables {names}: optimizer {tables.optimizer.name} has no lookup of ours; allowed: {allowed}")
    for attribute, what in (
        ("_used_rowwise_adagrad_with_counter", "row counters (counter_based_regularization, cowclip_regularization)"),
        ("_used_rowwise_adagrad_with_global_weight_decay", "global weight decay (WeightDecayMode.DECOUPLE_GLOBAL)"),
    ):
        if getattr(tables, attribute):
            raise ValueError(f"tables {names}: our lookup has no {what}; allowed is row-wise Adagrad without")
    locations = {location for _, _, location, _ in tables.embedding_specs}
    if not locations <= {EmbeddingLocation.HOST, EmbeddingLocation.DEVICE}:
        wrong = ", ".join(sorted(location.name for location in locations))
        raise ValueError(f"tables {names} lie in {wrong}; our lookup reads HOST and DEVICE memory alone")
