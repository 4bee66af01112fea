"""Ids of some ranks and steps, and what TableCollisions makes of them on the ranks; see tests/npu/ranks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.npu.parallel import device_of
from turbogr_plugin.pipeline.collisions import BUCKETS, CountedTable, TableCollisions

#: Of two modules; `items` is read by two features, `large` is counted by its hash.
TABLES = (
    CountedTable("bags", "items", 60, ("item", "negative")),
    CountedTable("bags", "gender", 2, ("gender",)),
    CountedTable("sequences", "large", 40 * BUCKETS, ("large",)),
    CountedTable("sequences", "never", 5, ("never",)),
)
STEPS, SAMPLES = 6, 5


def ids_of(rank: int, step: int) -> dict[str, list[list[int]]]:
    """Of each feature, the ids of each sample: skewed, with samples and steps that have none."""
    generator = torch.Generator().manual_seed(1000 * rank + step)

    def drawn(rows: int) -> list[list[int]]:
        counts = torch.randint(0, 4, (SAMPLES,), generator=generator).tolist()
        return [
            (torch.rand(count, generator=generator, dtype=torch.float64) ** 3 * rows).long().tolist()
            for count in counts
        ]

    ids = {
        "item": drawn(60),
        "negative": drawn(60),
        "gender": drawn(2),
        # From thirty rows all over the table, so that they meet.
        "large": [[row * 12_345 for row in sample] for sample in drawn(30)],
        "never": [[] for _ in range(SAMPLES)],
        "unread": drawn(9),
    }
    return {key: [[] for _ in range(SAMPLES)] for key in ids} if step == 3 and rank == 0 else ids


def features_of(rank: int, step: int) -> KeyedJaggedTensor:
    """The same as a batch has them."""
    ids = ids_of(rank, step)
    return KeyedJaggedTensor(
        keys=list(ids),
        values=torch.tensor(
            [one for samples in ids.values() for sample in samples for one in sample], dtype=torch.int64
        ),
        lengths=torch.tensor([len(sample) for samples in ids.values() for sample in samples], dtype=torch.int64),
    )


def alphas(*, device_type: str) -> dict[str, float]:
    """By table, from this rank's ids and those of the others."""
    device = device_of(device_type)
    counted = TableCollisions(TABLES, device, dist.all_reduce if dist.get_world_size() > 1 else None)
    for step in range(STEPS):
        features = features_of(dist.get_rank(), step).to(device)
        for module in ("bags", "sequences"):
            counted.observe(module, features)
        counted.end_step()
    return {table.table: alpha for table, alpha in counted.alphas().items()}
