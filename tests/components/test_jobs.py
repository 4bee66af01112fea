"""The TorchX components: what they launch, under which interpreter, what comes back, and what profiles may say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.components.component_test_base import ComponentTestCase
from torchx.runner import get_runner
from torchx.specs.finder import get_components

from turbogr_plugin.components import jobs
from turbogr_plugin.components.launcher import parse_nodes_and_ranks
from turbogr_plugin.components.node import launch_command
from turbogr_plugin.components.profiles import profile_files, profile_problems
from turbogr_plugin.errors import InputError

ROOT = Path(__file__).parents[2]
TORCHX = Path(sys.executable).parent / "torchx"


class ComponentsAreReadableByTorchx(ComponentTestCase):
    """TorchX's own check: the function passes its linter and its help can be made from the docstring."""

    def test_train_is_readable(self) -> None:
        self.validate(jobs, "train")

    def test_evaluate_is_readable(self) -> None:
        self.validate(jobs, "evaluate")

    def test_prepare_is_readable(self) -> None:
        self.validate(jobs, "prepare")


def _torchx(*arguments: str, cwd: Path, timeout: int = 60) -> subprocess.CompletedProcess[str]:
    """Runs torchx as from a shell where no environment is activated; stdout and stderr come as one text."""
    return subprocess.run(
        [TORCHX, *arguments],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def test_our_components_are_registered_and_torchx_keeps_its_own() -> None:
    names = set(get_components())
    assert {"turbogr.train", "turbogr.evaluate", "turbogr.prepare", "dist.ddp", "dist.spmd", "utils.echo"} <= names
    # Helpers that a component module imports must not show up as components.
    assert {name for name in names if name.startswith("turbogr.")} == {
        "turbogr.train",
        "turbogr.evaluate",
        "turbogr.prepare",
    }


def test_train_runs_the_command_line_under_its_own_interpreter() -> None:
    app = jobs.train("--training.epochs", "3", config="configs/Some Run.yaml", j="1x4", output="runs/a", resume=True)
    (role,) = app.roles
    assert app.name == "some-run"
    assert (role.entrypoint, role.num_replicas) == (sys.executable, 1)
    text = " ".join(role.args)
    assert text.startswith("-m torch.distributed.run --nnodes 1 --nproc-per-node 4 --standalone ")
    assert text.endswith(
        " -m turbogr_plugin.cli train --config configs/Some Run.yaml --output runs/a --resume --training.epochs 3"
    )


def test_train_without_an_output_gets_a_run_folder_named_after_the_launch() -> None:
    with get_runner() as runner:
        info = runner.dryrun(jobs.train(config="configs/demo.yaml"), "local_cwd", cfg={"log_dir": "unused"})
    request = info.request
    args = request.role_params["ranks"][0].args
    assert args[args.index("--output") + 1] == f"runs/{request.app_id}"
    assert request.app_id.startswith("demo-")


def test_resuming_without_a_run_folder_is_refused() -> None:
    with pytest.raises(InputError, match="--output must name the run folder"):
        jobs.train(config="configs/demo.yaml", resume=True)


@pytest.mark.parametrize(
    ("text", "expected"), [("1x2", (1, 2)), ("3", (1, 3)), ("16x8", (16, 8))], ids=lambda value: str(value)
)
def test_nodes_and_ranks_are_read_as_torchx_writes_them(text: str, expected: tuple[int, int]) -> None:
    assert parse_nodes_and_ranks(text) == expected


@pytest.mark.parametrize("text", ["", "0x2", "2x0", "1:2x4", "x2", "2x", "2 x 2", "-1", "1x2x3"])
def test_a_size_that_cannot_be_launched_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"j={text!r}: expected NODESxRANKS")):
        parse_nodes_and_ranks(text)


def test_no_threads_are_refused() -> None:
    with pytest.raises(InputError, match="threads=0"):
        jobs.train(config="a.yaml", threads=0)


@pytest.mark.parametrize(("host", "expected"), [("node-7", "node-7:1234"), ("", "localhost:1234")])
def test_several_nodes_meet_at_the_first_one_and_get_their_arguments_unchanged(host: str, expected: str) -> None:
    odd = ["--a.text", "two words", "--a.quote", "it's", "--a.star", "*", "--a.dollar", "$HOME"]
    app = jobs.train(*odd, config="a.yaml", j="2x4", rdzv_port=1234)
    with get_runner() as runner:
        info = runner.dryrun(app, "local_cwd", cfg={"log_dir": "unused"})
    request = info.request
    replicas = request.role_params["ranks"]
    assert len(replicas) == 2
    interpreter, m, module, *given = replicas[1].args
    assert [interpreter, m, module] == [sys.executable, "-m", "turbogr_plugin.components.node"]
    arguments = launch_command(given, {"TORCHX_RANK0_HOST": host})
    assert arguments[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == expected
    assert arguments[arguments.index("--rdzv-id") + 1] == request.app_id
    assert arguments[arguments.index("--nnodes") + 1] == "2"
    assert "--standalone" not in arguments
    assert arguments[-len(odd) :] == odd


def test_a_bare_torchx_run_is_the_demo() -> None:
    result = _torchx("run", "--dryrun", cwd=ROOT)
    assert result.returncode == 0, result.stdout
    plan = result.stdout.partition("=== SCHEDULER REQUEST ===")[2]
    assert f"'{sys.prefix}/bin/python" in plan
    assert "'configs/ml-100k.yaml'" in plan
    assert "'log_dir': 'runs/torchx/" in plan


# Launched through TorchX's form FILE:FUNCTION, so that exit codes and output are tested without training anything.
TRIVIAL_COMPONENT = '''
from torchx.specs import AppDef
from turbogr_plugin.components.launcher import ranks_app

def job(code: int) -> AppDef:
    """Two ranks that print and end.

    Args:
        code: exit code of rank 1
    """
    return ranks_app("trivial", ["rank.py", str(code)], j="1x2")
'''
TRIVIAL_RANK = """
import os, sys
for line in range(500):
    print(f"rank {os.environ['RANK']} line {line} of {os.environ['WORLD_SIZE']} ranks")
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", [0, 3])
def test_torchx_run_streams_every_line_and_fails_exactly_when_a_rank_does(code: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TRIVIAL_COMPONENT)
    (tmp_path / "rank.py").write_text(TRIVIAL_RANK)
    result = _torchx(
        "run", "-s", "local_cwd", "-cfg", "log_dir=logs", "job.py:job", "--code", str(code), cwd=tmp_path, timeout=50
    )
    assert (result.returncode == 0) == (code == 0), result.stdout
    if code == 0:  # the launcher stops the other rank when one fails, so only then all its lines must be there
        for rank in (0, 1):
            assert len(re.findall(rf"\[{rank}\]:rank {rank} line \d+ of 2 ranks", result.stdout)) == 500
    assert "to stderr" in result.stdout
    assert list((tmp_path / "logs").rglob("stdout.log"))


def test_every_profile_of_the_checkout_is_free_of_problems() -> None:
    files = profile_files(ROOT)
    assert [file.name for file in files] == [".torchxconfig", "local.ini"]
    assert [problem for file in files for problem in profile_problems(file)] == []


GOOD_PROFILE = """
[cli:run]
component = turbogr.train
scheduler = local_cwd
[component:turbogr.train]
config = a.yaml
resume = False
threads = 2
env = A=1,B=2
[local_cwd]
log_dir = runs
prepend_cwd = True
"""


def test_a_profile_of_known_keys_has_no_problems(tmp_path: Path) -> None:
    path = tmp_path / "good.ini"
    path.write_text(GOOD_PROFILE)
    assert profile_problems(path) == []


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("config = a.yaml", "confg = a.yaml", "[component:turbogr.train]: unknown confg"),
        ("config = a.yaml", "Config = a.yaml", "[component:turbogr.train]: unknown Config"),
        ("log_dir = runs", "logdir = runs", "[local_cwd]: unknown logdir"),
        ("scheduler = local_cwd", "sheduler = local_cwd", "[cli:run]: unknown sheduler"),
        ("scheduler = local_cwd", "scheduler = lokal", "[cli:run]: scheduler = lokal: unknown scheduler"),
        ("component = turbogr.train", "component = turbogr.trian", "[cli:run]: component = turbogr.trian: unknown"),
        ("[component:turbogr.train]", "[component:turbogr.trian]", "unknown component turbogr.trian"),
        ("[component:turbogr.train]", "[components:turbogr.train]", "[components:turbogr.train]: unknown section"),
        ("[local_cwd]", "[local_cvd]", "unknown scheduler local_cvd"),
        ("resume = False", "resume = yes", "resume = yes: not a bool"),
        ("threads = 2", "threads = two", "threads = two: not a int"),
        ("env = A=1,B=2", "env = A", "env = A: not a "),
        ("prepend_cwd = True", "prepend_cwd = ja", "prepend_cwd = ja: not a bool"),
        ("[cli:run]", "[DEFAULT]\nj = 1x2\n[cli:run]", "[DEFAULT]: j would be set in every section"),
        ("[local_cwd]", "log_dir", "not an INI file"),
    ],
)
def test_a_profile_mistake_that_torchx_would_pass_over_is_named(
    right: str, wrong: str, named: str, tmp_path: Path
) -> None:
    assert right in GOOD_PROFILE
    path = tmp_path / "bad.ini"
    path.write_text(GOOD_PROFILE.replace(right, wrong, 1))
    problems = profile_problems(path)
    assert [problem for problem in problems if named in problem and problem.startswith(f"{path}: ")], problems
