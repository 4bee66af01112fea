"""What all ranks know of a batch before any of them starts its collectives.

Whether a rank's loader has another batch, has ended or has failed is that rank's own affair until the batch's feature
all-to-all, which all ranks must join or none. So the ranks tell each other first: one message of a number per rank and
batch, and the reason if one has failed. It is exchanged where the all-to-all's sizes are, off the caller's thread.

Left out: what follows from the answer (that is the pipeline's choice: all stop, or who has ended goes on with empty
batches), and ranks that fail anywhere else (rank_failure.py).
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.distributed as dist

from turbogr_plugin.backend.rank_exchange import RankExchange
from turbogr_plugin.errors import InputError
from turbogr_plugin.pipeline.rank_failure import RankFailure, RankInputError, reason_of


class BatchStatus(IntEnum):
    """What a rank says of its next batch."""

    HAS_BATCH = 0
    EXHAUSTED = 1
    FAILED = 2
    BAD_INPUT = 3
    """It has failed with what its user can mend."""


def failed_with(exception: Exception) -> tuple[BatchStatus, str]:
    """What a rank says of a batch that has raised."""
    if isinstance(exception, InputError):
        return BatchStatus.BAD_INPUT, str(exception)  # written for the user: it needs no type in front
    return BatchStatus.FAILED, reason_of(exception)


class StepAgreement:
    """The exchange of one BatchStatus per rank, collective over a process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Args:
        group: of all ranks that train together (with groups of ranks: of all groups), on which nothing else runs
            concurrently; None is the default group, or a single process.
        device: where the message lives; with a backend for cpu in the group that saves a wait for the device.
        """
        self._exchange = RankExchange(device, group)
        self._ranks = list(range(self._exchange.world_size)) if group is None else dist.get_process_group_ranks(group)

    def exchange(self, status: BatchStatus, message: str = "") -> list[BatchStatus]:
        """The status of every rank, in the group's order; a collective.

        Args:
            status: of this rank.
            message: with FAILED and BAD_INPUT: why, such as `failed_with` gives it.

        Raises:
            RankFailure: on all ranks, the failing one too, if one has failed: the first of them, with its message; a
                RankInputError where that is bad input.
            ValueError: `status` is none.
        """
        own = torch.tensor([BatchStatus(status)], dtype=torch.int64, device=self._exchange.device)
        told = self._exchange.gather_rows(own, sizes=[1] * len(self._ranks))
        statuses = [BatchStatus(int(each)) for each in told]
        failed = [rank for rank, each in enumerate(statuses) if each in (BatchStatus.FAILED, BatchStatus.BAD_INPUT)]
        if failed:
            first = failed[0]
            kind = RankInputError if statuses[first] == BatchStatus.BAD_INPUT else RankFailure
            raise kind(self._ranks[first], self._exchange.gather_texts(message)[first])
        return statuses

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sums a tensor where the messages live over the ranks, in place; a collective."""
        self._exchange.sum_(tensor)
