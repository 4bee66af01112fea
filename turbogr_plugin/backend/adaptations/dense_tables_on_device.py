"""Data-parallel tables on npu lie on npu.

TorchRec builds the tables of its dense kernel on the CPU wherever there is neither CUDA nor MTIA, whatever device it is
given. DDP then moves parameters that are no leaves, and stops. Here they are built on the CPU as they are, initialised
there, and moved: they get the values of a run on the CPU. Tables on the CPU stay as upstream has them, and so does
upstream's fault that an EmbeddingCollection planned data_parallel on the CPU pools its rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation

_MODULE = "torchrec.distributed.batched_embedding_kernel"
_SEQUENCE = f"{_MODULE}:BatchedDenseEmbedding.__init__"
_POOLED = f"{_MODULE}:BatchedDenseEmbeddingBag.__init__"
_VIEWS = f"{_MODULE}:_gen_named_parameters_by_table_dense"
_TABLES = "fbgemm_gpu.split_table_batched_embeddings_ops_training:DenseTableBatchedEmbeddingBagsCodegen.__init__"


def _moved_to_npu(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(
        self: Any, config: Any, pg: Any = None, device: torch.device | None = None, *args: Any, **kwargs: Any
    ) -> None:
        original(self, config, pg, device, *args, **kwargs)
        if device is not None and device.type == "npu":
            _move(self, device)

    return __init__


def _move(kernel: Any, device: torch.device) -> None:
    from torchrec.distributed.batched_embedding_kernel import _gen_named_parameters_by_table_dense

    tables = kernel._emb_module
    feature_dims = tables.feature_dims
    tables.to(device)
    tables.feature_dims = feature_dims  # fbgemm reads it on the host
    tables.use_cpu, tables.current_device = False, device
    # the parameters by table are views of the buffer that has just been replaced
    kernel._param_per_table = dict(
        _gen_named_parameters_by_table_dense(tables, kernel.table_name_to_count.copy(), kernel._config)
    )


def _adaptation(target: str, fingerprint: str, line: int) -> Adaptation:
    return Adaptation(
        target=target,
        replace=_moved_to_npu,
        why="data-parallel tables given to npu are made on the CPU, and DDP cannot move them",
        upstream=f"torchrec 1.8.0, distributed/batched_embedding_kernel.py:{line}",
        delete_when="the dense kernels pass their device on to fbgemm",
        written_for={target: fingerprint, _VIEWS: "9f7dcf9f874c9860", _TABLES: "98a785b330362cbf"},
    )


ADAPTATIONS: tuple[Adaptation, ...] = (
    _adaptation(_SEQUENCE, "27942d44bd4d3569", 2890),
    _adaptation(_POOLED, "fb1656950ed5a8b3", 4670),
)
