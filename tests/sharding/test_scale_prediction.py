"""`turbogr plan`: the paper's models on growing clusters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from turbogr_plugin.sharding import cpu_topology, npu_topology
from turbogr_plugin.sharding.plan_command import ranks_of
from turbogr_plugin.sharding.scale_prediction import PAPER_MODELS, kuairand_items, predict_scale, scale_lines
from turbogr_plugin.sharding.topologies import save_topology

#: Table 1 of the paper: million parameters, TFLOPs per step, samples/s, MFU.
TABLE_1 = {
    "hstu-tiny": (0.17, 0.13, 3475.17, 0.43),
    "hstu-large": (83.97, 4.33, 1616.83, 24.74),
    "hstu-long": (83.97, 7.15, 770.79, 34.08),
    "fuxi-small": (3.18, 1.18, 3218.31, 3.78),
    "fuxi-large": (201.55, 8.25, 1156.26, 39.34),
    "fuxi-long": (201.55, 11.54, 574.39, 54.71),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_the_arithmetic_of_a_sample_is_what_the_paper_reports(name: str) -> None:
    size, _, rate, utilisation = TABLE_1[name]
    model = PAPER_MODELS[name]
    assert model.parameters / 1e6 == pytest.approx(size, rel=0.04)
    # Samples/s x FLOPs of a sample / MFU is the peak of all devices, the same in every row.
    assert rate * model.sample_flops / (utilisation / 100) == pytest.approx(12.12e15, rel=0.02)


def test_communication_grows_with_the_ranks_and_efficiency_falls() -> None:
    model = PAPER_MODELS["fuxi-large"]
    points = predict_scale(
        model,
        [npu_topology("atlas-800t-a2", nodes=nodes) for nodes in (1, 2, 8, 32)],
        access=kuairand_items(350),
        peak_flops=94.7e12,
        utilisation=0.5,
        planner={"group_size": 8},
    )
    steps = [point.chosen.prediction for point in points if point.chosen and point.chosen.prediction]
    assert len(steps) == 4
    assert [step.communication for step in steps] == sorted(step.communication for step in steps)
    assert len({step.dense for step in steps}) == 1
    rows = scale_lines(model, points)
    assert rows[1].split()[-1] == "1.000"
    assert float(rows[-1].split()[-1]) < 1


def test_sizes_that_do_not_fit_say_so_in_their_row() -> None:
    points = predict_scale(
        PAPER_MODELS["fuxi-large"],
        [npu_topology("atlas-800t-a2", nodes=1, devices_per_node=2), npu_topology("atlas-800t-a2", nodes=1)],
        access=kuairand_items(1),
        peak_flops=1e14,
        utilisation=0.5,
    )
    rows = scale_lines(PAPER_MODELS["fuxi-large"], points)
    assert rows[1].startswith("     2 no plan for")
    assert rows[2].split()[:2] == ["8", "8"]


def test_the_command_prints_a_table_or_json() -> None:
    outcome = runs.run_here("plan", "--ranks", "8..32", "--model", "hstu-tiny", "--wire", "fp16")
    assert outcome.code == 0, outcome.err
    assert "atlas-800t-a2 (published figures): 196 GB/s per rank inside a fast domain, 25 GB/s between" in outcome.out
    assert [line.split()[0] for line in outcome.out.splitlines()[-3:]] == ["8", "16", "32"]
    outcome = runs.run_here("plan", "--ranks", "8,16", "--model", "hstu-tiny", "--json")
    assert [point["ranks"] for point in json.loads(outcome.out)["models"]["hstu-tiny"]] == [8, 16]


def test_the_command_takes_measured_links(tmp_path: Path) -> None:
    topology = cpu_topology(ranks_per_node=2, nodes=2, memory_bytes=64 << 30, intra=1e9, inter=1e7)
    save_topology(topology, tmp_path / "links.json")
    outcome = runs.run_here(
        *("plan", "--ranks", "4..8", "--model", "hstu-tiny", "--peak-tflops", "0.1"),
        *("--topology", str(tmp_path / "links.json")),
    )
    assert outcome.code == 0, outcome.err
    assert "links.json (measured): 1 GB/s per rank inside a fast domain, 0.01 GB/s between" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "8.."], "--ranks must be like 8..4096 or 8,32,128 with numbers >= 1, got '8..'"),
        (["--ranks", "12"], "--ranks must be whole hosts of 8 ranks, got 12"),
        (["--model", "gpt"], "--model must be all or one of hstu-tiny"),
        (["--machine", "abacus"], "machine must be one of atlas-800t-a2"),
        (["--topology", "nowhere.json"], "nowhere.json"),
        (["--at-least", "0"], "at_least must be between 1 and 15379 exposures, got 0"),
        (["--utilisation", "2"], "utilisation in (0, 1]"),
        (["--wire", "int8"], "invalid choice"),
    ],
)
def test_the_command_refuses_wrong_options_in_one_line(arguments: list[str], message: str) -> None:
    outcome = runs.run_here("plan", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_ranks_are_powers_or_a_list() -> None:
    assert ranks_of("8..100") == [8, 16, 32, 64]
    assert ranks_of("3,5") == [3, 5]
    for text in ("", "0..8", "8..4", "a,b", "1..2..3"):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            ranks_of(text)


def test_links_are_measured_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    values: Any = ["measure-links", "--output", str(path), "--megabytes", "0.1", "--repeats", "1", "--memory-gb", "1"]
    outcome = runs.run_here(*values)
    assert outcome.code == 0, outcome.err
    assert f"written to {path}" in outcome.out
    assert json.loads(path.read_text())["nodes"] == 1
    refused = runs.run_here("measure-links", "--output", str(tmp_path / "no" / "x.json"))
    assert refused.code == 2
    assert "is no folder" in refused.err
