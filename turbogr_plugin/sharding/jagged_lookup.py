"""Our lookup in fbgemm's table modules, where TorchRec has built them: `use_jagged_lookup`.

On `npu` TorchRec ends in our lookup anyway, since the operators of fbgemm are ours there. On CPU fbgemm has its own,
and this is how tables leave them. Each of fbgemm's table modules gets a subclass of its own class, which in its forward
pass puts our operator where fbgemm's forward calls the lookup. The module, its buffers and parameters stay the objects
that they are, so that checkpoints, fused optimizers, DistributedModelParallel and pipelines see no difference.

What changes besides speed, on CPU: tables in bf16 and rows returned in bf16 (fbgemm's CPU kernels lack both);
stochastic rounding and `max_norm` (they ignore both); L2 and decoupled weight decay of pooled tables in fp32 (they
ignore it there, and honour it in fp16 tables and without pooling); `use_index_dedup` (no kernel); data-parallel
sequences, which fbgemm pools there by mistake; and an id that its table does not have, where nothing checks bounds
(BoundsCheckMode.NONE, data-parallel tables): zeros and no update, where fbgemm raises.

Left out, each refused by name: row counters and global weight decay of Adagrad, sparse gradients (OptimType.NONE),
tables in INT8, FP8 and the like, unified memory, caches, SSD and key-value tables. Adam on CPU: fbgemm's module refuses
it before it could be ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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
_PRECISIONS = (SparseType.FP32, SparseType.FP16, SparseType.BF16)
_LOCATIONS = {EmbeddingLocation.HOST, EmbeddingLocation.DEVICE}
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


class DeduplicatingCollection(ShardedEmbeddingCollection):
    """TorchRec's with `use_index_dedup`, whose different ids of a batch our operator finds.

    fbgemm finds them on CUDA only.
    """

    def _dedup_indices(
        self, ctx: EmbeddingCollectionContext, input_feature_splits: list[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        with OurOperators():
            return super()._dedup_indices(ctx, input_feature_splits)


def use_jagged_lookup(module: nn.Module) -> int:
    """Puts our lookup into each of fbgemm's table modules in a module, which keep their state and their optimizers.

    Sharded collections that deduplicate ids (`use_index_dedup`) find the different ones with our operator from then on.

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
    collections = [
        child
        for child in _modules(module)
        if isinstance(child, ShardedEmbeddingCollection)
        and child._use_index_dedup
        and getattr(child._device, "type", None) != "npu"
    ]
    for collection in collections:
        if type(collection) not in (ShardedEmbeddingCollection, DeduplicatingCollection):
            raise ValueError(
                f"{type(collection).__name__} with use_index_dedup is a subclass of TorchRec's collection, which would "
                "lose its methods"
            )
    found = [tables for tables in table_modules(module) if tables.weights_offsets.device.type != "npu"]
    for tables in found:
        if type(tables) not in (*_OURS, *_OURS.values()):
            raise ValueError(f"{type(tables).__name__} is a subclass of fbgemm's tables, which would lose its forward")
        names = ", ".join(getattr(tables, "table_names", None) or ["(without names)"])
        _check_precision(tables, names)
        if isinstance(tables, SplitTableBatchedEmbeddingBagsCodegen):
            _check_optimizer(tables, names)
    for tables in found:
        # As torch's fully_shard does. Another object would have to be put into the optimizer and the parameters by
        # table, which hold this one; and TorchRec builds it eight calls below the sharder.
        tables.__class__ = _OURS.get(type(tables), type(tables))
    for collection in collections:
        collection.__class__ = DeduplicatingCollection
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
    tables = getattr(kernel, "_emb_module", None)
    held = type(tables)
    names = ", ".join(table.name for table in kernel.config.embedding_tables)
    if held not in (*_OURS, *_OURS.values()):
        raise ValueError(
            f"tables {names}: {type(kernel).__name__} holds them in {held.__name__}, which has no lookup of ours; "
            f"allowed are the compute kernels {' and '.join(KERNELS)}"
        )
    assert isinstance(tables, (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen))
    _check_precision(tables, names)


def _check_precision(
    tables: SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen, names: str
) -> None:
    if tables.weights_precision not in _PRECISIONS:
        allowed = ", ".join(each.name for each in _PRECISIONS)
        raise ValueError(
            f"tables {names}: weights_precision {tables.weights_precision.name} has no lookup of ours; "
            f"allowed: {allowed}"
        )


def _check_optimizer(tables: SplitTableBatchedEmbeddingBagsCodegen, names: str) -> None:
    if tables.optimizer not in _OPTIMIZERS:
        allowed = ", ".join(each.name for each in _OPTIMIZERS)
        raise ValueError(f"tables {names}: optimizer {tables.optimizer.name} has no lookup of ours; allowed: {allowed}")
    for attribute, what in (
        ("_used_rowwise_adagrad_with_counter", "row counters (counter_based_regularization, cowclip_regularization)"),
        ("_used_rowwise_adagrad_with_global_weight_decay", "global weight decay (WeightDecayMode.DECOUPLE_GLOBAL)"),
    ):
        if getattr(tables, attribute):
            raise ValueError(f"tables {names}: our lookup has no {what}; allowed is row-wise Adagrad without")
    others = {location for _, _, location, _ in tables.embedding_specs} - _LOCATIONS
    if others:
        wrong = ", ".join(sorted(location.name for location in others))
        raise ValueError(f"tables {names} lie in {wrong}; our lookup reads HOST and DEVICE memory alone")
