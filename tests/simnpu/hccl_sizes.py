"""Cases of `hccl` on npu tensors whose sizes differ by rank: as NCCL serves them, and refused where they do not fit.

gloo is no oracle for most of them: it takes no lists of different sizes to gather, and where a rank sends what another
does not expect it aborts, waits, or leaves elements as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def refused(call: Callable[[], Any], text: str) -> None:
    """Calls what has to raise an error with this text (a regular expression) in it."""
    with pytest.raises((ValueError, RuntimeError), match=text):
        call()


def gathered(group: Group, device: torch.device) -> None:
    n, rank = group.size(), group.rank()
    parts = [torch.empty(other, device=device) for other in range(n)]  # nothing from rank 0
    dist.all_gather(parts, torch.full((rank,), float(rank), device=device), group=group)
    assert [part.tolist() for part in parts] == [[float(other)] * other for other in range(n)]
    # Into parts of one tensor, as TorchRec gathers the gradients of a variable batch sharded by rows.
    whole = torch.empty(sum(2 * other + 1 for other in range(n)), 3, dtype=torch.float16, device=device)
    rows = torch.full((2 * rank + 1, 3), float(rank), dtype=torch.float16, device=device)
    work = dist.all_gather(list(whole.split([2 * other + 1 for other in range(n)])), rows, group=group, async_op=True)
    work.wait()
    assert whole[:, 1].tolist() == [float(other) for other in range(n) for _ in range(2 * other + 1)]
    # Two lists at once, of which one differs by rank.
    lists = [[torch.empty(other + 1, device=device), torch.empty(2, device=device)] for other in range(n)]
    dist.all_gather_coalesced(
        lists, [torch.full((rank + 1,), float(rank), device=device), torch.ones(2, device=device) * rank], group=group
    )
    assert [part.tolist() for part, _ in lists] == [[float(other)] * (other + 1) for other in range(n)]
    assert [part.tolist() for _, part in lists] == [[float(other)] * 2 for other in range(n)]


def reduced_and_scattered(group: Group, device: torch.device) -> None:
    n, rank = group.size(), group.rank()
    for dtype, op, scale in (
        (torch.float32, dist.ReduceOp.SUM, 1),
        (torch.float32, dist.ReduceOp.AVG, n),
        (torch.int64, dist.ReduceOp.MAX, 0),
    ):
        chunks = [torch.full((2 * other, 2), rank + 10 * other, dtype=dtype, device=device) for other in range(n)]
        output = torch.empty(2 * rank, 2, dtype=dtype, device=device)  # nothing for rank 0
        dist.reduce_scatter(output, chunks, op=op, group=group)
        values = [other + 10 * rank for other in range(n)]
        expected = sum(values) / scale if scale else max(values)
        assert output.tolist() == [[expected, expected]] * (2 * rank)


def exchanged(group: Group, device: torch.device) -> None:
    n, rank = group.size(), group.rank()
    received = [torch.empty(other, dtype=torch.int64, device=device) for other in range(n)]
    sent = [torch.full((rank,), 10 * rank + other, device=device) for other in range(n)]
    dist.all_to_all(received, sent, group=group)
    assert [part.tolist() for part in received] == [[10 * other + rank] * other for other in range(n)]


def refused_on_every_rank(group: Group, device: torch.device) -> None:
    """One rank has other sizes than the rest; all get the same error, and the group lives on."""
    n, rank, last = group.size(), group.rank(), group.size() - 1

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def gather(size: int, *, dtype: torch.dtype = torch.float32) -> None:
        dist.all_gather([zeros(2, dtype=dtype) for _ in range(n)], zeros(size, dtype=dtype), group=group)

    def scatter(size: int) -> None:
        dist.reduce_scatter(zeros(2), [zeros(2) for _ in range(last)] + [zeros(size)], group=group)

    def exchange(received: list[int], sent: list[int]) -> None:
        output, x = zeros(sum(received), 3), zeros(sum(sent), 3)
        dist.all_to_all_single(output, x, received, sent, group=group)

    refused(lambda: gather(3 if rank == last else 2), f"rank {last} sends 3 elements to rank 0, which expects 2")
    refused(lambda: gather(0 if rank == 0 else 2), "rank 0 sends 0 elements to rank 0, which expects 2")
    refused(lambda: scatter(5 if rank == 0 else 2), f"rank 0 sends 5 elements to rank {last}, which expects 2")
    # gloo: what is sent too much aborts the receiver, what is missing is left as it was.
    for first, told in ((4, "sends 6 elements to rank 0, which expects 12"), (1, "expects 3")):
        received = [2] * last + [first] if rank == 0 else [2] * n
        refused(lambda sizes=received: exchange(sizes, [2] * n), f"rank {last} .*{told}")  # type: ignore[misc]
    lists = [[zeros(2) for _ in range(n)] for _ in range(2)]
    refused(lambda: dist.all_to_all([*lists[0][:last], zeros(rank + 1)], lists[1], group=group), "which expects 1")
    refused(
        lambda: gather(2, dtype=torch.float16 if rank == last else torch.float32),
        f"rank 0 has Float, rank {last} has Half",
    )
    refused(lambda: gather(2) if rank else scatter(2), "rank 0 calls REDUCE_SCATTER, rank 1 calls ALLGATHER")
    counts = 1 + (rank == last)
    refused(
        lambda: dist.all_gather_coalesced([[zeros(2)] * counts for _ in range(n)], [zeros(2)] * counts, group=group),
        f"rank 0 gives 1 tensors, rank {last} gives 2",
    )
    gathered(group, device)


CASES: dict[str, Callable[[Group, torch.device], None]] = {
    "parts of unequal sizes are gathered": gathered,
    "parts of unequal sizes are reduced and scattered": reduced_and_scattered,
    "parts of unequal sizes are exchanged": exchanged,
    "sizes that do not fit are refused on every rank": refused_on_every_rank,
}
