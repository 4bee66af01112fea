"""Exchange of differently sized rows between ranks, and agreement on errors, for work off the training step.

Evaluation and recommendation gather what each rank happens to have (queries, histories of any length, nothing at all)
and must not hang when one rank's input is bad: an error found on one rank is raised on all of them, before the next
collective. Every method but the properties is a collective: all ranks of the group call it in the same order.

Left out: anything for the hot path. Each call reads sizes on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from turbogr_plugin.errors import InputError

_INPUT_ERROR, _OTHER_ERROR = 1, 2


def caught(action: Callable[[], None]) -> Exception | None:
    """Run `action` and return what it raised, to be handed to `RankExchange.agree`."""
    try:
        action()
    except Exception as error:
        return error
    return None


class RankExchange:
    """The collectives of one process group; a process without torch.distributed is a group of one.

    Args:
        device: where exchanged tensors live (the group's backend has to serve it: gloo serves cpu).
        process_group: None is the default group.
    """

    def __init__(self, device: torch.device, process_group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self._group = process_group
        distributed = dist.is_available() and dist.is_initialized()
        if process_group is not None and not distributed:
            raise ValueError("process_group is given but torch.distributed is not initialized")
        self.rank: int = dist.get_rank(process_group) if distributed else 0
        self.world_size: int = dist.get_world_size(process_group) if distributed else 1

    def agree(self, error: Exception | None, *values: int, doing: str) -> list[list[int]]:
        """Raise on every rank if any rank brings an error; else return the `values` of every rank, `[rank][i]`.

        Args:
            error: what this rank found wrong, or None.
            values: integers to share, as many on every rank.
            doing: what was being done, for the message on the other ranks.

        Raises:
            Exception: `error` itself on the rank that brought it.
            InputError: on the other ranks, if the first failing rank brought an InputError; it repeats the message.
            RuntimeError: on the other ranks, if it brought anything else.
        """
        code = 0 if error is None else _INPUT_ERROR if isinstance(error, InputError) else _OTHER_ERROR
        shared = torch.tensor([[code, *values]], dtype=torch.int64, device=self.device)
        table = [row.flatten().tolist() for row in self._gather_equal(shared)]
        failed = [rank for rank, row in enumerate(table) if row[0]]
        if not failed:
            return [row[1:] for row in table]
        reasons = self.gather_texts("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        message = f"rank {failed[0]} failed while {doing}: {reasons[failed[0]]}"
        raise InputError(message) if table[failed[0]][0] == _INPUT_ERROR else RuntimeError(message)

    def gather_rows(self, rows: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The rows of every rank, in rank order.

        Args:
            rows: [n, ...]; n may differ between ranks and be 0, dtype and trailing shape may not.
            sizes: n of every rank if all ranks know it already, which saves an exchange.

        Returns:
            One tensor [n of that rank, ...] per rank.
        """
        if self.world_size == 1:
            return [rows]
        if sizes is None:
            own = torch.tensor([rows.size(0)], dtype=torch.int64, device=self.device)
            sizes = [int(size) for size in self._gather_equal(own)]
        longest = max(sizes)
        if longest == 0:
            return [rows] * self.world_size
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.size(0)] = rows
        return [part[:size] for part, size in zip(self._gather_equal(padded), sizes, strict=True)]

    def gather_texts(self, text: str) -> list[str]:
        """The text of every rank, in rank order; what UTF-8 cannot hold arrives escaped."""
        sent = list(text.encode("utf-8", "backslashreplace"))
        rows = self.gather_rows(torch.tensor(sent, dtype=torch.uint8, device=self.device))
        return [bytes(row.tolist()).decode("utf-8") for row in rows]

    def sum_(self, tensor: Tensor) -> None:
        """Sum `tensor` (same shape on every rank) over the ranks, in place."""
        if self.world_size > 1 and tensor.numel() > 0:
            dist.all_reduce(tensor, group=self._group)

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        if self.world_size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return parts
