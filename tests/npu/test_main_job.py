"""The project's own training job on the simulated npu: the run of the CPU, without a missing operator or a host sync.

Inside a step only TorchRec waits for the device: for lengths and split sizes of its all-to-alls, and with small index
tensors that it makes on the host; all of that on the thread of the sparse lane. docs/npu_host_syncs.md lists the lines;
a test here holds it to them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import forked, runs

EPOCHS = 3
WARM_UP = 2  # steps in which TorchRec, fbgemm and DDP make index tensors, counters and buckets once
PROGRAM = str(Path(__file__).with_name("npu_commands.py"))
DOCS = Path(__file__).parents[2] / "docs/npu_host_syncs.md"

pytestmark = pytest.mark.timeout(240)


class Job(NamedTuple):
    """A training run on both devices."""

    cpu: Path
    npu: Path
    seen: list[dict[str, Any]]
    """By rank: what simnpu saw."""

    def step_syncs(self, *, dense: bool = False) -> Counter[str]:
        """Waits of rank 0 inside the steps by the innermost line outside of the plugin's backend.

        Args:
            dense: those of the dense stages, in the thread that trains; else those of the sparse lane's thread.
        """
        found: Counter[str] = Counter()
        for operator, where, count in self.seen[0]["host_syncs"]:
            stages = [line.rpartition(" in ")[2] for line in where if "pipeline/fine_grained_stages.py" in line]
            if not stages or any(stage.startswith("_dense_") for stage in stages) != dense:
                continue
            line = next(line for line in where if "/turbogr_plugin/backend/" not in line)
            found[f"{operator} at {line.partition('site-packages/')[2] or line}"] += count
        return found


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def job(request: pytest.FixtureRequest, tiny: Path) -> Job:
    ranks = request.param
    names = {device: f"{device}-of-{ranks}" for device in ("cpu", "npu")}
    train = ["train", "--config", "tiny.yaml", "--training.epochs", str(EPOCHS)]
    commands = [[*train, "--device", device, "--output", name] for device, name in names.items()]
    (tiny / "commands.json").write_text(json.dumps(commands))
    program = [PROGRAM, "commands.json"]
    done = forked.run_program(program, ranks=ranks if ranks > 1 else None, folder=tiny, timeout=runs.TIMEOUT)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(ranks):
        for code, _, err in json.loads((tiny / f"outcomes-{rank}.json").read_text()):
            assert code == 0, err[-6000:]
    seen = [json.loads((tiny / f"npu-{rank}.json").read_text()) for rank in range(ranks)]
    return Job(tiny / names["cpu"], tiny / names["npu"], seen)


def test_losses_on_npu_are_those_on_cpu(job: Job) -> None:
    expected = runs.losses(job.cpu)
    assert len(expected) == EPOCHS * runs.STEPS_PER_EPOCH
    np.testing.assert_allclose(runs.losses(job.npu), expected, rtol=1e-6)


def test_the_best_checkpoint_tests_alike(job: Job) -> None:
    for kind in ("filtered", "unfiltered"):
        assert runs.metrics(job.npu)["test"][kind] == pytest.approx(runs.metrics(job.cpu)["test"][kind], rel=1e-6)
    assert runs.metrics(job.npu)["device"].startswith("npu")


def test_groups_of_ranks_train_on_npu_as_all_ranks_on_cpu(tiny: Path) -> None:
    train = ["train", "--config", "tiny.yaml", "--training.epochs", "2"]
    commands = [
        [*train, "--output", "whole-cpu"],
        [*train, "--output", "groups-npu", "--device", "npu", "--groups.size", "1"],
    ]
    (tiny / "commands.json").write_text(json.dumps(commands))
    done = forked.run_program([PROGRAM, "commands.json"], ranks=2, folder=tiny, timeout=runs.TIMEOUT)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        assert [code for code, *_ in json.loads((tiny / f"outcomes-{rank}.json").read_text())] == [0, 0]
        seen = json.loads((tiny / f"npu-{rank}.json").read_text())
        assert (seen["cpu_fallbacks"], seen["races"]) == ({}, [])
    # Gradients of the two groups are added in another order.
    np.testing.assert_allclose(runs.losses(tiny / "groups-npu"), runs.losses(tiny / "whole-cpu"), rtol=1e-5)


def test_no_operator_is_missing_and_no_use_of_memory_unordered(job: Job) -> None:
    for rank in job.seen:
        assert rank["cpu_fallbacks"] == {}
        assert rank["races"] == []
        assert [name for name in rank["executed"] if name.startswith(("fbgemm", "turbogr"))] == []


def test_only_torchrec_waits_for_the_device_inside_a_step(job: Job) -> None:
    once = len(job.seen) * WARM_UP
    assert sum(job.step_syncs().values()) > EPOCHS * runs.STEPS_PER_EPOCH * (len(job.seen) - 1)
    others = {sync: count for sync, count in job.step_syncs().items() if " at torchrec/" not in sync and count > once}
    assert others == {}
    assert not any("turbogr_plugin" in sync for sync in job.step_syncs())


def test_the_thread_that_trains_waits_for_nothing_but_once_for_the_buckets_of_ddp(job: Job) -> None:
    waits = job.step_syncs(dense=True)
    assert sum(waits.values()) <= 2
    assert all(" at torchrec/distributed/model_parallel.py:" in sync for sync in waits)


def test_the_docs_list_every_line_that_waits(job: Job) -> None:
    listed = set(re.findall(r"`((?:torchrec|fbgemm_gpu)/[\w/]+\.py:\d+)`", DOCS.read_text()))
    waiting = {sync.partition(" at ")[2].partition(" in ")[0] for sync in job.step_syncs()}
    assert waiting - listed == set()


@pytest.mark.parametrize("job", [2], indirect=True, ids=["two ranks"])
def test_the_docs_count_the_waits_of_a_step(job: Job) -> None:
    found: Counter[str] = Counter()
    for sync, count in job.step_syncs().items():
        found[sync.partition(" at ")[2].partition(" in ")[0]] += count
    rows = re.findall(r"^\| `([\w/]+\.py:\d+)` \| (\d+) \| (\d+) \|", DOCS.read_text(), re.MULTILINE)
    assert len(rows) == 9
    steps = EPOCHS * (runs.STEPS_PER_EPOCH - 1)
    expected = {line: int(times) * steps + int(first) * EPOCHS for line, times, first in rows}
    assert {line: found[line] for line in expected} == expected
