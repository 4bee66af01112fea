"""How many bytes a lookup returns and sends, with rows in fp32 and in fp16: counted on two ranks, by collective.

TorchRec's collections are sharded over two gloo ranks and take one step, forward and backward, once with
`output_dtype` FP32 and once with FP16 in their fused_params. Counted are the rows that the table modules return, the
gradients that come back to them, and what each collective is given to send, as far as it carries floating point: ids,
lengths and splits are integers and the same in both. A count does not depend on the machine, so one step is enough.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 2
CASES = (
    ("sequence", "row_wise"),
    ("sequence", "table_wise"),
    ("sequence", "column_wise"),
    ("pooled", "row_wise"),
    ("pooled", "table_wise"),
)
"""Kind of the collection and sharding type."""
_SETTINGS = ("fp32", "fp16")


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes of floating-point tensors that are handed to collectives, by the collective's name."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            schema = func._schema.arguments
            given = dict(zip((argument.name for argument in schema), args, strict=False)) | (kwargs or {})
            # What is received has its own arguments; where a collective works in place they are the only ones.
            names = [name for name in ("input", "input_tensor", "input_tensors", "inputs") if name in given]
            values = [given[name] for name in names] or [given.get("tensors")]
            size = sum(_bytes(tensor) for tensor in _tensors(values) if tensor.is_floating_point())
            if size:
                self.sent[func._schema.name.partition("::")[2].rstrip("_")] += size
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def count_step(tables: Iterable[nn.Module], step: Callable[[], Tensor]) -> dict[str, int]:
    """Bytes of one step on this rank.

    Args:
        tables: the modules whose rows count.
        step: returns the loss.

    Returns:
        "rows returned", "gradients returned", and "sent by NAME" for each collective that carried floating point.
    """
    found: Counter[str] = Counter()

    def returned(module: nn.Module, args: Any, output: Tensor) -> None:
        found["rows returned"] += _bytes(output)
        output.register_hook(lambda gradient: found.update({"gradients returned": _bytes(gradient)}))

    hooks = [module.register_forward_hook(returned) for module in tables]
    with CollectiveBytes() as counted:
        step().backward()
    for hook in hooks:
        hook.remove()
    return dict(found) | {f"sent by {name}": size for name, size in counted.sent.items()}


def count_case(kind: str, sharding: str, output: str, device: torch.device | None = None) -> dict[str, int]:
    """Bytes of one step of one case on this rank, whose process group is there.

    Args:
        kind: "sequence" (EmbeddingCollection) or "pooled" (EmbeddingBagCollection).
        sharding: row_wise, table_wise or column_wise.
        output: "fp32" or "fp16": dtype of the returned rows.
        device: of the tables; None is the CPU.
    """
    from benchmarks.lookup import sharded  # imports TorchRec: 3 s that only the ranks need
    from turbogr_plugin.sharding.jagged_lookup import table_modules

    device = device or torch.device("cpu")
    model, batch = sharded.collection(kind, sharding, output, device), sharded.batch(device)

    def step() -> Tensor:
        found = model(batch)
        values = [found.values()] if kind == "pooled" else [jagged.values() for jagged in found.values()]
        return torch.stack([value.float().square().sum() for value in values]).sum()

    return count_step(table_modules(model), step)


def _count_all(rank: int, folder: str) -> None:
    """All cases on one rank; writes what it counted to a file."""
    import logging
    import os

    logging.disable(logging.ERROR)  # TorchRec warns of much that is chosen here
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    counts = {
        f"{kind} {sharding}": {output: count_case(kind, sharding, output) for output in _SETTINGS}
        for kind, sharding in CASES
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


def measure() -> dict[str, Any]:
    """Counts all cases on two ranks, in processes of their own (about 15 s, mostly imports).

    Returns:
        "bytes_ratio": the largest of all ratios fp16 / fp32, over cases and counters; "bytes": the counts of both
        settings by case and counter, summed over the ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lookup-bytes-") as folder:
        processes = [context.Process(target=_count_all, args=(rank, folder)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"counting bytes failed on ranks with exit codes {[p.exitcode for p in processes]}")
        of_ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {"bytes_ratio": ratio(totals := total(of_ranks)), "bytes": totals}


def total(of_ranks: list[dict[str, dict[str, dict[str, int]]]]) -> dict[str, dict[str, dict[str, int]]]:
    """Counts by case, setting and counter, summed over ranks."""
    summed: dict[str, dict[str, Counter[str]]] = {}
    for counts in of_ranks:
        for case, settings in counts.items():
            for setting, counted in settings.items():
                summed.setdefault(case, {}).setdefault(setting, Counter()).update(counted)
    return {case: {setting: dict(sums) for setting, sums in of.items()} for case, of in summed.items()}


def ratio(totals: dict[str, dict[str, dict[str, int]]]) -> float:
    """The largest ratio fp16 / fp32 of any counter in any case."""
    return max(
        counted / settings["fp32"][counter]
        for settings in totals.values()
        for counter, counted in settings["fp16"].items()
    )


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
