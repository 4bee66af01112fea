"""fbgemm's fused tables on npu are built in their accelerator form.

TorchRec gives the tables of a device that it does not know to fbgemm as CPU tables that happen to lie on npu. fbgemm
then allows only the optimizers of its CPU kernels (no Adam) and no preallocated output for variable batch sizes. In the
accelerator form both are allowed; fbgemm labels it ComputeDevice.CUDA, and `device` decides where the tables lie.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation

_MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
_INIT = f"{_MODULE}:SplitTableBatchedEmbeddingBagsCodegen.__init__"


def _accelerator_form(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        device = given.arguments.get("device")
        if device is not None and torch.device(device).type == "npu":
            _adapt(given.arguments)
        original(*given.args, **given.kwargs)

    return __init__


def _adapt(given: dict[str, Any]) -> None:
    """Changes the arguments of a module on npu.

    Raises:
        ValueError: a table or a state of the optimizer is to lie in unified memory.
    """
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

    specs = []
    for number, (rows, width, location, _) in enumerate(given["embedding_specs"]):
        if location not in (EmbeddingLocation.HOST, EmbeddingLocation.DEVICE):
            raise ValueError(
                f"embedding_specs: table {number} has location {location.name}, but npu has neither unified memory nor "
                "caches for it; allowed is DEVICE (TorchRec: compute kernel fused)"
            )
        specs.append((rows, width, EmbeddingLocation.DEVICE, ComputeDevice.CUDA))
    if given.get("uvm_non_rowwise_momentum"):
        raise ValueError("uvm_non_rowwise_momentum is True, but npu has no unified memory; allowed is False")
    given["embedding_specs"] = specs
    # the dtype of a cache that is not there; fbgemm refuses the bf16 that TorchRec passes on from bf16 tables
    given["cache_precision"] = SparseType.FP32


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_INIT,
        replace=_accelerator_form,
        why="tables on npu refuse Adam and preallocated outputs, because they are taken for CPU tables",
        upstream="fbgemm_gpu 1.8.0, split_table_batched_embeddings_ops_training.py:1047 and :4115; "
        "torchrec 1.8.0, distributed/batched_embedding_kernel.py:2553 and :3751",
        delete_when="TorchRec asks the accelerator for the kind of its tables",
        written_for={_INIT: "ea325190ade2423d"},
    ),
)
