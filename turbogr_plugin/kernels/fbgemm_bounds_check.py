"""fbgemm's check of ids and offsets before a table lookup, for `npu`.

Modes, as upstream: WARNING (the default of fbgemm's modules, and TorchRec's unless `bounds_check_mode` is among its
fused parameters) and IGNORE repair in place: an id that its table does not have becomes 0, offsets are moved into
range, made non-decreasing and ended at the number of ids. FATAL raises. The id -1 stands for a pruned row and is legal.

WARNING and IGNORE never wait for the device. The number of violations of the last batch stays in the `warning` counter
on the device, as upstream. Its message cannot be printed by a kernel here, as CUDA does: a running total is copied to
pinned memory without waiting, and a later call that finds the copy complete logs how many came since the last message.
What the very last calls of a process find is in the counter only.

FATAL reads one flag per call, and so waits for the device once; CUDA asserts inside the kernel, which costs no wait but
loses the process and the numbers. Use it to find bad data, not to train.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.table_bags import bags_of_positions, features_of_bags

FATAL, WARNING, IGNORE = 0, 1, 2  # fbgemm's BoundsCheckMode
PRUNED = -1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repair:
    """Repaired input, and what was wrong with it."""

    offsets: Tensor
    """[bags + 1] int64."""
    indices: Tensor
    """[N] int64."""
    wrong_end: Tensor
    """[] bool: the offsets do not end at N."""
    wrong_bags: Tensor
    """[bags] bool: the bag begins or ends out of range, or ends before it begins."""
    wrong_indices: Tensor
    """[N] bool: the table has no such row."""
    feature: Tensor
    """[N] int64: feature of each id under the repaired offsets."""

    def violations(self) -> Tensor:
        """[] int64: what upstream adds to its counter."""
        return self.wrong_end.to(torch.int64) + self.wrong_bags.sum() + self.wrong_indices.sum()


def repair_input(rows_per_table: Tensor, indices: Tensor, offsets: Tensor, bag_offsets: Tensor | None) -> Repair:
    """Repairs ids and offsets as fbgemm's kernels do, without waiting for the device.

    Upstream walks through the bags: each begins where the one before was made to end, and ends there or later, at most
    at N. That is a running maximum.

    Args:
        rows_per_table: [T] int64, by feature.
        indices: [N].
        offsets: [bags + 1].
        bag_offsets: [T + 1], with variable batch sizes.
    """
    count, bags, features = indices.numel(), offsets.numel() - 1, rows_per_table.numel()
    given = offsets.to(torch.int64)
    ended = torch.cat([given[:-1], torch.full_like(given[-1:], count)])
    repaired = ended.clamp(0, count).cummax(0).values
    begin, end = torch.cat([ended[:1], repaired[1:-1]]), ended[1:]
    wrong_bags = (begin < 0) | (begin > end) | (end > count)
    bag = bags_of_positions(repaired, count)
    claimed = (bag >= 0) & (bag < bags)
    feature = features_of_bags(bag.clamp(0, max(bags - 1, 0)), bags, features, bag_offsets)
    index = indices.to(torch.int64)
    inside = (index >= 0) & (index < rows_per_table.index_select(0, feature))
    wrong_indices = claimed & (index != PRUNED) & ~inside
    return Repair(
        offsets=repaired,
        indices=index.masked_fill(wrong_indices, 0),
        wrong_end=given[-1] != count,
        wrong_bags=wrong_bags,
        wrong_indices=wrong_indices,
        feature=feature,
    )


def describe(repair: Repair, rows_per_table: Tensor, indices: Tensor, offsets: Tensor) -> str:
    """The first violation, with its numbers. Reads the device."""
    if bool(repair.wrong_end):
        return f"offsets end at {int(offsets[-1])}, but there are {indices.numel()} ids"
    if bool(repair.wrong_bags.any()):
        bag = int(repair.wrong_bags.to(torch.int32).argmax())
        return (
            f"bag {bag} goes from offset {int(offsets[bag])} to {int(offsets[bag + 1])}; offsets must not decrease and "
            f"lie in 0 to {indices.numel()}"
        )
    position = int(repair.wrong_indices.to(torch.int32).argmax())
    feature = int(repair.feature[position])
    return (
        f"id {int(indices[position])} at position {position} belongs to feature {feature}, whose table has "
        f"{int(rows_per_table[feature])} rows"
    )


@dataclass
class _Report:
    """Violations found on one stream, logged some time later and without waiting for the device."""

    total: Tensor
    """[1] int64 on the device: all violations so far."""
    consequence: str
    """What became of them, in words."""
    logged: int = 0
    pending: tuple[Tensor, torch.Event] | None = None
    """The total on its way to the host."""

    def add(self, violations: Tensor) -> None:
        """Counts violations ([] int64); logs those of earlier calls that have arrived."""
        self.total.add_(violations)
        if self.pending is not None:
            arrived, event = self.pending
            if not event.query():
                return
            if int(arrived) > self.logged:
                _logger.warning(
                    "embedding lookup: %d ids or offsets were out of range and %s",
                    int(arrived) - self.logged,
                    self.consequence,
                )
                self.logged = int(arrived)
        arrived = torch.empty(1, dtype=torch.int64, pin_memory=True)
        arrived.copy_(self.total, non_blocking=True)
        event = torch.Event(self.total.device)
        event.record()
        self.pending = (arrived, event)


_REPAIRED = "have been repaired; bounds_check_mode FATAL names the first one"

_reports: dict[tuple[torch.device, int, str], _Report] = {}  # by stream, because streams must not share a total


def report_later(violations: Tensor, consequence: str) -> None:
    """Logs violations some time later, and without waiting for the device; on CPU, whose callers can raise, nothing.

    Args:
        violations: [] int64, how many this call has found.
        consequence: what became of them, in words that follow "... were out of range and".
    """
    device = violations.device
    if device.type == "cpu":
        return
    key = (device, torch.accelerator.current_stream(device).stream_id, consequence)
    if key not in _reports:
        _reports[key] = _Report(torch.zeros(1, dtype=torch.int64, device=device), consequence)
    _reports[key].add(violations)


def bounds_check_indices(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bounds_check_mode: int,
    warning: Tensor,
    weights: Tensor | None = None,
    B_offsets: Tensor | None = None,
    max_B: int = -1,
    b_t_map: Tensor | None = None,
    info_B_num_bits: int = -1,
    info_B_mask: int = -1,
    bounds_check_version: int = 1,
    prefetch_pipeline: bool = False,
) -> None:
    """fbgemm::bounds_check_indices. Repairs `indices` and `offsets` in place, or raises (FATAL).

    Args:
        rows_per_table: [T] int64, by feature.
        indices: [N] int32 or int64.
        offsets: [bags + 1] int32 or int64.
        bounds_check_mode: 0 (FATAL), 1 (WARNING) or 2 (IGNORE).
        warning: [1] int64: WARNING leaves the number of violations here.
        weights: [N] or None.
        B_offsets: [T + 1] int32: first bag of each feature, with variable batch sizes.
        max_B: largest batch size, with variable batch sizes.
        b_t_map: not used; feature and sample are found from `B_offsets`.
        info_B_num_bits: not used.
        info_B_mask: not used.
        bounds_check_version: both versions repair alike.
        prefetch_pipeline: not used.

    Raises:
        ValueError: shapes that do not fit together, an unknown mode, or in mode FATAL a violation.
    """
    features, count = rows_per_table.numel(), indices.numel()
    bags = offsets.numel() - 1
    if bounds_check_mode not in (FATAL, WARNING, IGNORE):
        raise ValueError(f"bounds_check_mode must be 0 (FATAL), 1 (WARNING) or 2 (IGNORE), got {bounds_check_mode}")
    if B_offsets is None and (bags < 0 or bags % features):
        raise ValueError(f"offsets has {bags + 1} elements, which is no multiple of {features} features plus 1")
    if B_offsets is not None and max_B < 0:
        raise ValueError(f"B_offsets came with max_B {max_B}")
    if weights is not None and weights.numel() not in (0, count):
        raise ValueError(f"weights has {weights.numel()} elements for {count} indices")
    repair = repair_input(rows_per_table, indices, offsets, B_offsets)
    if bounds_check_mode == FATAL:
        if bool(repair.violations()):
            raise ValueError(
                "embedding lookup: " + describe(repair, rows_per_table, indices, offsets) + " (bounds_check_mode FATAL)"
            )
        return
    if bounds_check_mode == WARNING:
        violations = repair.violations()
        warning.copy_(violations.view(1))
        report_later(violations, _REPAIRED)
    offsets.copy_(repair.offsets)
    indices.copy_(repair.indices)


KERNELS = (
    NpuKernel(
        schema="fbgemm::bounds_check_indices(Tensor rows_per_table, Tensor(a!) indices, Tensor(b!) offsets, "
        "int bounds_check_mode, Tensor(c!) warning, Tensor(d!)? weights=None, Tensor? B_offsets=None, "
        "SymInt max_B=-1, Tensor? b_t_map=None, int info_B_num_bits=-1, int info_B_mask=-1, "
        "int bounds_check_version=1, bool prefetch_pipeline=False) -> ()",
        function=bounds_check_indices,
    ),
)
