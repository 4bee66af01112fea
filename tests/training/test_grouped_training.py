"""Training in groups of ranks by the command line: the losses and the table of all ranks in one group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import runs
from turbogr_plugin.sharding import cpu_topology
from turbogr_plugin.sharding.topologies import save_topology

RANKS = 4
OPTIONS = ["--training.epochs", "2", "--training.log_every", "1"]
CASES: dict[str, list[str]] = {
    "plain": [],
    "2": ["--groups.size", "2"],
    "1, fp16": ["--groups.size", "1", "--groups.wire", "fp16"],
    "2, stale": ["--groups.size", "2", "--pipeline.staleness", "1"],
    "stale": ["--pipeline.staleness", "1"],
    "auto": ["--groups.size", "auto", "--groups.topology", "links.json"],
    "three": ["--groups.size", "3"],
    "links of other hosts": ["--groups.size", "auto", "--groups.topology", "other.json"],
}


def output(name: str) -> str:
    return "grouped-" + name.replace(", ", "-").replace(" ", "-")


@pytest.fixture(scope="module")
def trained(tiny: Path) -> dict[str, list[runs.Outcome]]:
    """Runs, then two that go on with others' checkpoints."""
    for name, ranks in (("links", RANKS), ("other", 2)):
        # A slow link: groups pay although ids hardly repeat.
        topology = cpu_topology(ranks_per_node=ranks // 2, nodes=2, memory_bytes=1 << 30, intra=1e9, inter=1e5)
        save_topology(topology, tiny / f"{name}.json")
    commands = {
        name: ["train", "--config", "tiny.yaml", "--output", output(name), *OPTIONS, *case]
        for name, case in CASES.items()
    }
    more = ["--training.epochs", "3", "--training.log_every", "1", "--resume"]
    for name, case in (("plain", "2"), ("2", "plain")):
        commands[f"{name} by {case}"] = [
            *("train", "--config", "tiny.yaml", "--output", output(name), *more, *CASES[case])
        ]
    return runs.run_commands(commands, ranks=RANKS, folder=tiny)


@pytest.mark.timeout(240)
def test_groups_train_and_rank_as_one_group_does(tiny: Path, trained: dict[str, list[runs.Outcome]]) -> None:
    for name in ("plain", "2", "1, fp16", "auto", "stale", "2, stale", "plain by 2", "2 by plain"):
        assert [outcome.code for outcome in trained[name]] == [0] * RANKS, (name, trained[name][0].err)
    losses = {name: runs.losses(tiny / output(name)) for name in CASES if trained[name][0].code == 0}
    assert len(losses["plain"]) == 3 * runs.STEPS_PER_EPOCH
    # Sums in another order; the third epoch began with the other's checkpoint.
    assert np.abs(losses["2"] / losses["plain"] - 1).max() < 1e-5
    two = 2 * runs.STEPS_PER_EPOCH
    assert np.abs(losses["auto"] / losses["plain"][:two] - 1).max() < 1e-5
    assert np.abs(losses["2, stale"] / losses["stale"] - 1).max() < 1e-5
    assert np.abs(losses["stale"] / losses["plain"][:two] - 1).max() > 1e-5
    narrow = np.abs(losses["1, fp16"] / losses["plain"][:two] - 1)
    assert 0 < narrow.max() < 1e-2
    tested = [runs.metrics(tiny / output(name))["test"]["unfiltered"] for name in ("2", "plain")]
    assert tested[0] == pytest.approx(tested[1], abs=1e-9)


@pytest.mark.timeout(240)
def test_sizes_that_cannot_be_end_with_code_2_on_every_rank(tiny: Path, trained: dict[str, list[runs.Outcome]]) -> None:
    assert [outcome.code for outcome in trained["three"]] == [2] * RANKS
    assert "groups: group_size must divide the 4 ranks" in trained["three"][0].err
    assert [outcome.code for outcome in trained["links of other hosts"]] == [2] * RANKS
    assert "groups: topology has 2 ranks, the process group has 4" in trained["links of other hosts"][0].err


@pytest.mark.timeout(240)
def test_a_grouped_run_says_so_and_is_evaluated_by_one_rank(tiny: Path, trained: dict[str, list[runs.Outcome]]) -> None:
    for name in ("2", "auto"):
        assert "4 ranks in 2 group(s) of 2" in trained[name][0].err
    assert "group(s) of" not in trained["plain"][0].err
    users = ["--users", "1000", "1420", "--k", "7"]
    commands = {"evaluate": ["evaluate", "--run", output("2")]}
    commands |= {name: ["recommend", "--run", output(name), *users] for name in ("2", "plain")}
    done = runs.run_commands(commands, ranks=None, folder=tiny)
    assert done["2"][0].out == done["plain"][0].out != ""
    (outcome,) = done["evaluate"]
    assert outcome.code == 0, outcome.err
    metrics = runs.metrics(tiny / output("2"))["test"]["filtered"]
    assert f"{metrics['ndcg@10']:.4f}" in outcome.out
