"""Features of TorchRec that need what an NPU does not have are refused where they are asked for, with the way out.

Without this they fail later, deep in fbgemm or torch, with a message that names an operator and no feature. Only the
device type npu is refused anything; docs/compatibility.md lists these and what else works, is refused or ignored.

Left out: kernels that keep tables in host memory (device_kernels.py), FULLY_SHARDED (dmp_collection.py) and memory
stashing (pipeline/adaptations/memory_stashing.py), which are refused there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType

from turbogr_plugin.backend.adaptation import Adaptation

_COMMUNICATION = "torchrec.distributed.fbgemm_qcomm_codec:get_qcomm_codecs_registry"
_PRUNING = "torchrec.distributed.itep_embeddingbag:ITEPEmbeddingBagCollectionSharder.shard"
_HASHING = "torchrec.modules.hash_mc_modules:HashZchManagedCollisionModule.__init__"
_QUANTIZED_BAGS = "torchrec.quant.embedding_modules:EmbeddingBagCollection.__init__"
_QUANTIZED_SEQUENCES = "torchrec.quant.embedding_modules:EmbeddingCollection.__init__"
_QUANTIZING = "torchrec.quant.embedding_modules:quantize_state_dict"
_RESHARDING = "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection.update_shards"
_METRICS = "torchrec.metrics.metric_module:generate_metric_module"

_PRECISIONS = (CommType.FP32, CommType.FP16, CommType.BF16)


def _on_npu(original: Callable[..., Any], check: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """`original`, after `check` of its arguments where its argument `device` is an npu."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        device = arguments.get("device")
        if device is not None and torch.device(device).type == "npu":
            check(arguments)
        return original(*args, **kwargs)

    return checked


def _refuse(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def check(arguments: dict[str, Any]) -> None:
        raise ValueError(message)

    return lambda original: _on_npu(original, check)


_QUANTIZED = (
    "quantized embeddings for inference have no lookup on npu: serve them on CPU (move the module there before it is "
    "quantized), or serve the trained module unquantized"
)


def _without_npu(original: Callable[..., torch.device]) -> Callable[..., torch.device]:
    @functools.wraps(original)
    def quantize_state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.device:
        if any(value.device.type == "npu" for value in module.state_dict().values() if isinstance(value, torch.Tensor)):
            raise ValueError(_QUANTIZED)
        return original(module, *args, **kwargs)

    return quantize_state_dict


def _check_communication(arguments: dict[str, Any]) -> None:
    config = arguments["qcomms_config"]
    for name in ("forward_precision", "backward_precision"):
        precision = getattr(config, name)
        if precision not in _PRECISIONS:
            raise ValueError(
                f"{name} {precision} has no codec on npu (fbgemm has it for CUDA): use one of "
                f"{', '.join(str(kind) for kind in _PRECISIONS)}"
            )


_UNTIL = "the operators exist for npu"

ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_COMMUNICATION,
        replace=lambda original: _on_npu(original, _check_communication),
        why="communication in FP8, INT8 or MX4 fails in its first all-to-all on a missing operator",
        upstream="torchrec 1.8.0, distributed/fbgemm_qcomm_codec.py:185; fbgemm_gpu 1.8.0, quantize_comm.py:86",
        delete_when=_UNTIL,
        written_for={_COMMUNICATION: "260ca83172677b9c"},
    ),
    Adaptation(
        target=_PRUNING,
        replace=_refuse(
            "in-training embedding pruning (ITEP) has its operators for CUDA only: shard the "
            "EmbeddingBagCollection inside without it on npu"
        ),
        why="ITEP calls torch.cuda by name, and operators of fbgemm that only CUDA builds have",
        upstream="torchrec 1.8.0, modules/itep_modules.py:282 and 288",
        delete_when=_UNTIL,
        written_for={_PRUNING: "5fa846f1f5586504"},
    ),
    Adaptation(
        target=_HASHING,
        replace=_refuse(
            "HashZchManagedCollisionModule has its hash table for CUDA and CPU only: use MCHManagedCollisionModule "
            "on npu"
        ),
        why="the first batch fails on fbgemm's zero_collision_hash",
        upstream="torchrec 1.8.0, modules/hash_mc_modules.py:451",
        delete_when=_UNTIL,
        written_for={_HASHING: "9d00c75654aad6b0"},
    ),
    *(
        Adaptation(
            target=target,
            replace=_refuse(_QUANTIZED),
            why="looking up fails on fbgemm's int_nbit lookup",
            upstream="torchrec 1.8.0, quant/embedding_modules.py:348",
            delete_when=_UNTIL,
            written_for={target: fingerprint_},
        )
        for target, fingerprint_ in ((_QUANTIZED_BAGS, "34e9aa24a4c45d21"), (_QUANTIZED_SEQUENCES, "d5963a5bc79b6102"))
    ),
    Adaptation(
        target=_QUANTIZING,
        replace=_without_npu,
        why="quantizing fails on fbgemm's row-wise quantization",
        upstream="torchrec 1.8.0, quant/embedding_modules.py:266",
        delete_when=_UNTIL,
        written_for={_QUANTIZING: "79adbae638c3b6c6"},
    ),
    Adaptation(
        target=_RESHARDING,
        replace=_refuse(
            "DistributedModelParallel.reshard moves tables, but their features go to where other tables were before: "
            "save a checkpoint, make the model anew with the new plan, and load it"
        ),
        why="after two tables have changed places each is looked up with the ids of the other, without a word",
        upstream="torchrec 1.8.0, distributed/embeddingbag.py:2039",
        delete_when="a resharded model on npu gives the embeddings that it gave before",
        written_for={_RESHARDING: "f0e30956e91aaa53"},
    ),
    Adaptation(
        target=_METRICS,
        replace=_refuse(
            "torchrec.metrics computes in float64, which NPUs do not have: make the metric module with "
            "device=torch.device('cpu') and pass it predictions, labels and weights from there"
        ),
        why="the first update fails on an operator with a Double tensor",
        upstream="torchrec 1.8.0, metrics/metric_module.py:719, metrics/ne.py:29",
        delete_when="the metrics compute in float32",
        written_for={_METRICS: "44ca4b01c3ded50c"},
    ),
)
