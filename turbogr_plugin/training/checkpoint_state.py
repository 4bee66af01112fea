"""What goes into a checkpoint: state dicts as flat tables, how two differ, random generators, state not yet created.

`checkpoints` stores it. Left out: the generators of `random` and `numpy`, because nothing here draws from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

PER_RANK = "per_rank"
"""Top-level key of the tensors that belong to one rank."""

T = TypeVar("T")


class Leaf(NamedTuple):
    """A value of a state dict and where it stands: `container[key] is value`."""

    container: Any
    key: Any
    value: Any


def _leaves(container: Any, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Tensors and JSON values under their dotted path, as DCP names them."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, torch.Tensor) or _is_plain(value):
            yield path, Leaf(container, key, value)
        elif isinstance(value, (dict, list)):
            yield from _leaves(value, path)
        else:
            raise TypeError(
                f"{path} is a {type(value).__name__}; allowed are tensors, numbers, strings, dicts and lists"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(element) for element in value)
    return value is None or isinstance(value, (bool, int, float, str))


def split_state(
    state: dict[str, Any], per_rank: dict[str, torch.Tensor] | None, rank: int
) -> tuple[dict[str, torch.Tensor], dict[str, Leaf]]:
    """The tensors of a state by path (those of this rank under its number), and the leaves that are no tensors."""
    for part in state:
        if part == PER_RANK or "." in str(part):
            raise ValueError(f"state has the key {part!r}; allowed are names without a dot other than {PER_RANK!r}")
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Leaf] = {}
    for path, leaf in _leaves(state):
        if path in tensors or path in values:
            raise ValueError(f"state has two values under the path {path}")
        if isinstance(leaf.value, torch.Tensor):
            tensors[path] = leaf.value
        else:
            values[path] = leaf
    for key, tensor in (per_rank or {}).items():
        tensors[f"{PER_RANK}.{rank}.{key}"] = tensor
    return tensors, values


def type_and_shape(tensor: torch.Tensor) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """Element type (None where this rank holds nothing) and global shape."""
    local: list[torch.Tensor] = [tensor]
    if isinstance(tensor, ShardedTensor):
        shards = [shard.tensor for shard in tensor.local_shards()]
        return (shards[0].dtype if shards else None), tuple(tensor.metadata().size)
    if isinstance(tensor, DTensor):
        inner = tensor.to_local()
        # TorchRec keeps several shards of a rank in one wrapper, which has no element type of its own.
        local = inner.local_shards() if hasattr(inner, "local_shards") else [inner]
    return (local[0].dtype if local else None), tuple(tensor.size())


def of_parts(entries: dict[str, T], parts: set[str]) -> dict[str, T]:
    """The entries under some top-level keys."""
    return {key: entry for key, entry in entries.items() if key.split(".", 1)[0] in parts}


def differences_of(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What a checkpoint has and what the model expects, in words, where they differ."""
    lines = [f"{key} is missing in the checkpoint" for key in sorted(expected.keys() - found.keys())]
    lines += [f"{key} is unknown to the model" for key in sorted(found.keys() - expected.keys())]
    for key in sorted(found.keys() & expected.keys()):
        if found[key] is None:
            continue
        (dtype, shape), (wanted_dtype, wanted_shape) = found[key], expected[key]
        if shape != wanted_shape:
            lines.append(f"{key} has the shape {list(shape)}, the model {list(wanted_shape)}")
            if len(shape) == 1 and key.rpartition(".")[2].startswith("momentum"):
                lines[-1] += " (row-wise state is kept once per column shard: keep the number of column shards)"
        elif wanted_dtype not in (None, dtype):
            lines.append(f"{key} is {dtype}, in the model {wanted_dtype}")
    return lines


def rng_state(device: torch.device | None = None) -> dict[str, torch.Tensor]:
    """States of torch's default generators, for `per_rank`.

    Args:
        device: Accelerator of this rank whose generator is kept too.

    Returns:
        uint8 vectors by device type.
    """
    state = {"cpu": torch.get_rng_state()}
    if device is not None and device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device | None = None) -> None:
    """Set torch's default generators to what `rng_state(device)` returned."""
    torch.set_rng_state(state["cpu"])
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def initialize_optimizer_state(optimizer: KeyedOptimizer) -> None:
    """Create the state that an optimizer makes in its first step, so that a checkpoint can be loaded into it.

    Parameters keep their values; the state's own values (step counts, warm-up) are those after one step with gradients
    of zero and must be overwritten by loading. Does nothing to an optimizer that has its state. Parameters that never
    received a gradient before the checkpoint have no state there, and loading will name them.

    Args:
        optimizer: Of torchrec; the parts of a CombinedOptimizer, fused ones under a WarmupOptimizer included, are
            treated each.
    """
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            initialize_optimizer_state(part)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        missing = [p for p in optimizer.params.values() if p.requires_grad and p not in optimizer.state]
    if not missing:
        return
    values = [p.detach().clone() for p in missing]
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(missing, values, strict=True):
            parameter.copy_(value)  # weight decay moves a parameter even without a gradient
            parameter.grad = None
