"""The configuration of `turbogr train`, given as a user gives it: a file, and options that override it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from turbogr_plugin.cli import main
from turbogr_plugin.errors import InputError
from turbogr_plugin.models.hstu import HSTUConfig
from turbogr_plugin.models.sizes import SIZES, SizeName
from turbogr_plugin.sharding.groups_config import GroupsConfig
from turbogr_plugin.training import jobs
from turbogr_plugin.training.config import DataConfig, EvaluationConfig, RunConfig, TrainingConfig

FILE: dict[str, Any] = {
    "output": "runs/x",
    "data": {"store": "stores/x"},
    "model": {"size": "small", "heads": 2},
    "training": {"epochs": 7, "global_batch_size": 32},
}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, bool]]:
    """The calls of the training job, which does nothing here."""
    calls: list[tuple[RunConfig, bool]] = []
    monkeypatch.setattr(jobs, "train", lambda config, *, resume: calls.append((config, resume)))
    return calls


def _exit_code(arguments: list[str]) -> int:
    """Of the command; a parser of options may end the process itself."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def _file(folder: Path, content: dict[str, Any]) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_options_override_the_file_which_overrides_the_defaults(
    tmp_path: Path, trained: list[tuple[RunConfig, bool]]
) -> None:
    options = ["--training.epochs", "3", "--model.dim=16", "--evaluation.cutoffs=[5,20]", "--resume"]
    assert _exit_code(["train", "--config", _file(tmp_path, FILE), *options]) == 0
    ((config, resume),) = trained
    assert resume is True
    assert (config.training.epochs, config.training.global_batch_size, config.training.patience) == (3, 32, 10)
    size = config.model.dimensions()
    assert (size.dim, size.heads, size.qk_dim, size.blocks) == (16, 2, 32, 4)
    assert config.evaluation.cutoffs == [5, 10, 20]
    assert config.data.prepare is None


@pytest.mark.parametrize(("options", "steps"), [([], 0), (["--profile"], 20), (["--profile", "7"], 7)])
def test_a_timeline_is_asked_for_with_or_without_its_steps(
    tmp_path: Path, trained: list[tuple[RunConfig, bool]], options: list[str], steps: int
) -> None:
    given = ["train", "--config", _file(tmp_path, FILE), *options, "--pipeline.staleness", "1"]
    assert _exit_code(given) == 0
    ((config, _),) = trained
    assert (config.profile, config.pipeline.kind, config.pipeline.staleness) == (steps, "fine_grained", 1)


@pytest.mark.parametrize("size", list(SIZES))
def test_a_named_size_sets_the_dimensions_that_are_not_given(
    tmp_path: Path, trained: list[tuple[RunConfig, bool]], size: SizeName
) -> None:
    expected = HSTUConfig(size=size)
    content = {name: value for name, value in FILE.items() if name != "model"}
    assert _exit_code(["train", "--config", _file(tmp_path, content), "--model.size", size]) == 0
    assert _exit_code(["train", "--config", _file(tmp_path, {**content, "model": {"size": size}})]) == 0
    assert [config.model for config, _ in trained] == [expected, expected]
    assert expected.dimensions() == SIZES[size]


def test_a_run_without_a_model_takes_the_default_size() -> None:
    assert RunConfig(output="x", data=DataConfig(store="x")).model == HSTUConfig()


def test_a_configuration_written_out_gives_the_same_run_again(
    tmp_path: Path, trained: list[tuple[RunConfig, bool]]
) -> None:
    prepare = {"format": "text", "inputs": ["log.txt"], "user_core": 1}
    content = {**FILE, "data": {"store": "stores/x", "prepare": prepare}}
    assert _exit_code(["train", "--config", _file(tmp_path, content), "--loss.temperature=0.1"]) == 0
    second = tmp_path / "resolved.yaml"
    second.write_text(yaml.safe_dump(asdict(trained[0][0])))  # as the run folder keeps it
    assert _exit_code(["train", "--config", str(second)]) == 0
    assert trained[1][0] == trained[0][0]
    assert trained[0][0].data.prepare is not None
    assert trained[0][0].data.prepare.inputs == ["log.txt"]


def test_the_demo_configuration_is_valid(trained: list[tuple[RunConfig, bool]]) -> None:
    demo = Path(__file__).parents[2] / "configs" / "ml-100k.yaml"
    assert _exit_code(["train", "--config", str(demo)]) == 0
    assert trained[0][0].data.prepare is not None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"traning": {"epochs": 3}}, "traning"),
    ({"training": {"epoch": 3}}, "epoch"),
    ({"model": {"dropouts": 0.1}}, "dropouts"),
    ({"training": {"epochs": "many"}}, "epochs"),
    ({"training": {"epochs": 2.5}}, "epochs"),
    ({"model": {"position_bias": "perhaps"}}, "position_bias"),
    ({"model": {"size": "huge"}}, "size"),
    ({"negatives": {"sharing": "batch"}}, "sharing"),
    ({"training": {"precision": "fp16"}}, "precision"),
    ({"training": {"table_precision": "int8"}}, "table_precision"),
    ({"training": {"table_rounding": "up"}}, "table_rounding"),
    ({"optimizer": {"betas": 0.9}}, "betas"),
    ({"data": {"workers": 1}}, "store"),
    ({"output": None}, "output"),
    # Values of the right type that are out of range or do not go together.
    ({"training": {"epochs": 0}}, "training.epochs must be at least 1, got 0"),
    ({"training": {"seed": -1}}, r"training.seed must be in [0, 2^32), got -1"),
    ({"model": {"dim": 0}}, "model.dim must be at least 1, got 0"),
    ({"model": {"dropout": 1.0}}, "model.dropout must be in [0, 1), got 1.0"),
    ({"loss": {"temperature": 0}}, "loss.temperature must be positive"),
    ({"negatives": {"count": 0}}, "negatives.count must be at least 1"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must be two numbers"),
    ({"evaluation": {"cutoffs": [0]}}, "evaluation.cutoffs must be at least 1"),
    ({"data": {"store": "x", "workers": -1}}, "data.workers must be at least 0"),
    ({"data": {"store": "x", "prepare": {"format": "ml-100k", "inputs": ["a"]}}}, "ml-100k takes no inputs"),
    ({"data": {"store": "x", "prepare": {"format": "text"}}}, "format text needs inputs"),
    ({"data": {"store": "x", "prepare": {"format": "csv", "inputs": ["a"]}}}, "format"),
    ({"timeout_minutes": 0}, "timeout_minutes must be positive, got 0"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_bad_values_in_the_file_end_with_code_2_and_name_the_key(
    tmp_path: Path,
    trained: list[tuple[RunConfig, bool]],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    named: str,
) -> None:
    assert _exit_code(["train", "--config", _file(tmp_path, {**FILE, **changes})]) == 2
    out, err = capsys.readouterr()
    assert named in err
    assert "Traceback" not in err and out == ""
    assert trained == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--trainng.epochs=3"], "trainng.epochs"),
        (["--training.epochs=three"], "epochs"),
        (["--training.epochs=0"], "training.epochs must be at least 1"),
        (["--resume=perhaps"], "resume"),
        (["extra"], "extra"),
        (["--config=nowhere.yaml"], "nowhere.yaml"),
    ],
    ids=str,
)
def test_bad_options_end_with_code_2_and_name_the_option(
    tmp_path: Path,
    trained: list[tuple[RunConfig, bool]],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    named: str,
) -> None:
    assert _exit_code(["train", "--config", _file(tmp_path, FILE), *options]) == 2
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err
    assert trained == []


@pytest.mark.parametrize("content", ["output: [unclosed", "- a\n- b\n", "output: x\n\toops: 1\n"])
def test_a_file_that_is_no_mapping_ends_with_code_2(
    tmp_path: Path, trained: list[tuple[RunConfig, bool]], capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert _exit_code(["train", "--config", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert trained == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda name=name: TrainingConfig(**{name: 0}), f"training.{name} must be at least 1, got 0")
            for name in ("epochs", "global_batch_size", "evaluate_every", "keep", "log_every")
        ),
        *(
            (lambda name=name: TrainingConfig(**{name: -1}), f"training.{name} must be at least 0, got -1")
            for name in ("patience", "checkpoint_every")
        ),
        (lambda: TrainingConfig(seed=1 << 32), r"training.seed must be in \[0, 2\^32\)"),
        (lambda: EvaluationConfig(batch_size=0), "evaluation.batch_size must be at least 1"),
        (lambda: EvaluationConfig(chunk_items=0), "evaluation.chunk_items must be at least 1"),
        (lambda: EvaluationConfig(max_users=-1), "evaluation.max_users must be at least 0"),
        (lambda: EvaluationConfig(cutoffs=[]), "evaluation.cutoffs"),
        (lambda: GroupsConfig(size=-1), "groups.size must be a number of ranks, 0 or auto, got -1"),
        (lambda: GroupsConfig(size=2, wire="int8"), "groups.wire must be one of fp32, bf16, fp16, got 'int8'"),  # type: ignore[arg-type]
        (lambda: GroupsConfig(size="auto"), "groups.size auto and groups.topology, .* belong together"),
        (lambda: GroupsConfig(size=2, topology="links.json"), "got size 2 and topology 'links.json'"),
        (lambda: GroupsConfig(wire="fp16"), "groups.wire is of groups: it needs a groups.size"),
        (lambda: DataConfig(store="x", workers=-1), "data.workers must be at least 0"),
        (
            lambda: RunConfig(output="x", data=DataConfig(store="x"), timeout_minutes=float("nan")),
            "timeout_minutes must be positive",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_the_classes_themselves(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_configuration_that_is_not_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_bytes(b"output: \xff\xfe\n")
    assert _exit_code(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err
