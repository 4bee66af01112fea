"""Applies what this package changes in TorchRec and registers its operators, in order, once per process.

    backend/adaptations   places of TorchRec and torch that know devices, and need no kernel
    kernels/              operators of fbgemm, and one of torch, for the `npu` dispatch keys
    sharding/adaptations  planner, sharders, DMPCollection
    pipeline/adaptations  train pipelines

Everything concerns the device type `npu`, or mends a fault of TorchRec that is named in its adaptation; what runs on
CPU and CUDA stays as it was. Nothing is changed on host versions that it was not written for, nor where another
backend than `npu` has taken PyTorch's PrivateUse1 keys.

Left out: the device. Nothing here imports torch_npu or needs a device to be there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from turbogr_plugin.backend.adaptation import Outcome, apply
from turbogr_plugin.backend.host_versions import unsupported_hosts

KERNEL_MODULES = (
    "aten_embedding_bag",
    "fbgemm_batch_metadata",
    "fbgemm_bounds_check",
    "fbgemm_bucketize",
    "fbgemm_cumsum",
    "fbgemm_dedup",
    "fbgemm_dense_lookup",
    "fbgemm_index_select",
    "fbgemm_jagged",
    "fbgemm_jagged_products",
    "fbgemm_jagged_select",
    "fbgemm_lookup",
    "fbgemm_permute",
    "fbgemm_placement",
    "fbgemm_pooled",
    "fbgemm_reorder",
)
"""Modules of kernels/ whose tuple KERNELS is registered."""


@dataclass(frozen=True)
class RegistrationReport:
    """What `register` has done in this process."""

    outcomes: list[Outcome]
    """One per adaptation and operator, in order; where all is refused, one per reason."""

    @property
    def refused(self) -> list[Outcome]:
        """What was not done."""
        return [outcome for outcome in self.outcomes if outcome.status == "refused"]

    def lines(self) -> list[str]:
        """The report as text: a count per status, then what was refused and why."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        return [f"adaptations and operators: {summary}"] + [
            f"refused {outcome.name}: {outcome.reason}" for outcome in self.refused
        ]


_lock = threading.RLock()
_report: RegistrationReport | None = None


def register() -> RegistrationReport:
    """Adapts TorchRec for this process and registers the operators; a second call returns the report of the first.

    Imports torchrec and fbgemm_gpu. Re-entrant and thread-safe.

    Returns:
        One outcome per item. Nothing is raised for an item that is refused.

    Raises:
        ImportError: torchrec cannot be imported.
    """
    global _report
    # Before the lock is taken: this import may call `register` by the lazy hook, in the thread that holds TorchRec's
    # import lock, so that two threads would wait for each other.
    import_module("torchrec")
    with _lock:
        if _report is None:
            report = _report = RegistrationReport([])  # what a call from within sees
            try:
                report.outcomes.extend(_refusals() or _apply_all())
            except BaseException:
                _report = None  # the next call tries again what this one has not reached
                raise
        return _report


def _refusals() -> list[Outcome]:
    """Why nothing may be done in this process; empty where everything may."""
    refusals = [
        Outcome(difference.pin.name, "refused", str(difference))
        for difference in unsupported_hosts()
        if difference.pin.needed
    ]
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("npu", "privateuseone"):
        refusals.append(Outcome("npu", "refused", f"another backend holds PyTorch's PrivateUse1 keys: {name!r}"))
    return refusals


def _apply_all() -> Iterator[Outcome]:
    # Imported here and not above: a host that is refused may lack what these modules import.
    from turbogr_plugin.backend.adaptations import ADAPTATIONS as BACKEND
    from turbogr_plugin.kernels import npu_operators
    from turbogr_plugin.pipeline.adaptations import ADAPTATIONS as PIPELINE
    from turbogr_plugin.sharding import perf_config
    from turbogr_plugin.sharding.adaptations import ADAPTATIONS as SHARDING

    yield from map(apply, BACKEND)
    for family in KERNEL_MODULES:
        yield from npu_operators.register(import_module(f"turbogr_plugin.kernels.{family}").KERNELS)
    yield from map(apply, SHARDING)
    yield perf_config.register()
    yield from map(apply, PIPELINE)
