"""`hccl` of the simulated npu gives what gloo gives on the CPU, in the order that streams demand.

The cases stand in hccl_ranks.py and run in one group of four ranks, over all of them and over pairs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked
from tests.simnpu import hccl_ranks

RANKS = 4


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """By rank: what went wrong, by case."""
    folder = tmp_path_factory.mktemp("hccl")
    done = forked.run_program([str(Path(hccl_ranks.__file__))], ranks=RANKS, folder=folder, timeout=600)
    assert done.returncode == 0, done.stderr[-8000:]
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in range(RANKS)]


def _agree(outcomes: list[dict[str, str]], name: str) -> None:
    for rank, of_rank in enumerate(outcomes):
        assert of_rank[name] == "", f"rank {rank}\n{of_rank[name]}"


@pytest.mark.timeout(660)  # the first test may build the simulated npu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", hccl_ranks.EQUAL_TO_GLOO)
def test_npu_tensors_get_what_gloo_gives_cpu_tensors(outcomes: list[dict[str, str]], ranks: int, name: str) -> None:
    _agree(outcomes, f"{ranks} ranks, {name}")


@pytest.mark.timeout(660)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", hccl_ranks.NPU_ONLY)
def test_what_gloo_cannot_show_holds(outcomes: list[dict[str, str]], ranks: int, name: str) -> None:
    _agree(outcomes, f"{ranks} ranks, {name}")


@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", ["hccl alone, objects", "hccl alone, a mesh of two dimensions"])
def test_a_world_of_hccl_alone_needs_no_gloo_beside_it(outcomes: list[dict[str, str]], name: str) -> None:
    _agree(outcomes, name)
