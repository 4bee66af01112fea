"""What the tests of StepAgreement run on ranks; see tests/npu/ranks.py."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from turbogr_plugin.pipeline.rank_failure import RankFailure, RankInputError
from turbogr_plugin.pipeline.step_agreement import BatchStatus, StepAgreement


def told(*, statuses: list[list[int]], device: str, group: list[int] | None = None) -> dict[str, Any]:
    """Exchanges step after step what `statuses[step][rank]` has, on all ranks or on those of `group`.

    Returns:
        What each step answered, as numbers or as [rank, message, whether it is bad input] of a RankFailure; and
        the collectives that ran.
    """
    rank = dist.get_rank()
    made = dist.new_group(group)
    if group is not None and rank not in group:
        return {}
    agreement, answers = StepAgreement(made, torch.device(device)), []
    calls = 0
    gather = dist.all_gather

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return gather(*arguments, **named)

    dist.all_gather = counted  # type: ignore[assignment]
    try:
        for step in statuses:
            status = BatchStatus(step[rank])
            try:
                answers.append([int(each) for each in agreement.exchange(status, f"rank {rank} \u4e2d \udcff" * 3)])
            except RankFailure as failure:
                answers.append([failure.rank, failure.reason, isinstance(failure, RankInputError)])
    finally:
        dist.all_gather = gather
    return {"answers": answers, "collectives": calls}


def told_to_a_late_rank() -> list[int]:
    """One rank comes late; nobody has an answer before it came."""
    agreement = StepAgreement(dist.new_group(), torch.device("cpu"))
    if dist.get_rank() == 1:
        time.sleep(0.3)
        return [int(each) for each in agreement.exchange(BatchStatus.EXHAUSTED)]
    return [int(each) for each in agreement.exchange(BatchStatus.HAS_BATCH)]
