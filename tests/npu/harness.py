"""Cases of the matrix on the pool of ranks: each on CPU and on npu, and what has to hold between the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.npu.cases import Case
from tests.npu.ranks import Call, Outcome, RankPool

TOLERANCE = 1e-6  # relative, of each loss


@dataclass
class Result:
    """A case on both devices."""

    case: Case
    cpu: Outcome
    npu: Outcome

    def deviation(self) -> float:
        """The largest relative difference of a loss, over ranks and steps."""
        pairs = [
            (ours, theirs)
            for rank_ours, rank_theirs in zip(self.npu.result(), self.cpu.result(), strict=True)
            for ours, theirs in zip(rank_ours["losses"], rank_theirs["losses"], strict=True)
        ]
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)

    def faults(self) -> list[str]:
        """What is wrong, one line each; empty where the case holds."""
        for device, outcome in (("cpu", self.cpu), ("npu", self.npu)):
            if outcome.error:
                return [f"{device}: {outcome.error}"]
        found = []
        if not self.deviation() <= TOLERANCE:
            found.append(f"losses differ by {self.deviation():.1e}")
        for rank, run in enumerate(self.npu.result()):
            found += [f"rank {rank}: {operator} ran on the CPU" for operator in run["cpu_fallbacks"]]
            found += [f"rank {rank}: race, {race}" for race in run["races"]]
            found += [f"rank {rank}: boxed {name}" for name in run["executed"] if name.startswith("fbgemm")]
            found += [f"rank {rank}: host sync {sync}" for sync in run["host_syncs"] if not _is_torchrecs(sync)]
        return found


def _is_torchrecs(sync: str) -> bool:
    """Whether TorchRec's own line made the host wait.

    The plugin's backend reads lengths in TorchRec's place, so its lines are passed over.
    """
    lines = sync.partition(" at ")[2].split(" < ")
    return "/torchrec/" in next(line for line in lines if "/turbogr_plugin/backend/" not in line)


def run_cases(pool: RankPool, cases: Sequence[Case], *, timeout: float) -> list[Result]:
    """Each case on CPU and on npu, in the order of the cases."""
    calls = [
        Call("tests.npu.script:run", {"name": case.name, "device_type": device}, case.world_size)
        for case in cases
        for device in ("cpu", "npu")
    ]
    outcomes = pool.run(calls, timeout=timeout)
    return [Result(case, outcomes[2 * at], outcomes[2 * at + 1]) for at, case in enumerate(cases)]
