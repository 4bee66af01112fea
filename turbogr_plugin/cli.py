"""The `turbogr` command: prepare, synthesize, train, evaluate, recommend, info, dryrun, doctor, plan, measure-links,
build.

Exit codes: 0 done, 2 bad input (one message on stderr), 1 anything else (with its traceback), and where dryrun or
doctor have found what would fail. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from turbogr_plugin import __version__
from turbogr_plugin.errors import InputError

if TYPE_CHECKING:
    from turbogr_plugin.training.config import RunConfig

Command = Callable[[Sequence[str]], int | None]
"""Gets its arguments; returns an exit code where it has one to tell."""

# What a path or a disk can do to any command. Other errors of the system are faults of ours and keep their traceback.
_MENDABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)


def _parser(command: str, description: str | None) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog=f"turbogr {command}", description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with the options below; later options override it")
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _prepare(arguments: Sequence[str]) -> None:
    """Filter interaction logs and write a store."""
    from turbogr_plugin.data.config import PrepareConfig
    from turbogr_plugin.data.prepare import prepare

    parser = _parser("prepare", _prepare.__doc__)
    parser.add_argument("inputs", type=str, nargs="*", help="A folder, or files in their chronological order")
    parser.add_argument("--output", type=str, required=True, help="Folder of the store")
    parser.add_argument("--feedback", type=str, nargs="*", help="Columns of which one must be positive (kuairand)")
    parser.add_class_arguments(PrepareConfig, None, fail_untyped=True, skip={"inputs", "feedback"})
    namespace = parser.parse_args(arguments)
    values = {key: value for key, value in namespace.as_dict().items() if key not in ("config", "output")}
    if values["feedback"] is None:
        del values["feedback"]
    report = prepare(PrepareConfig(**values), Path(namespace.output), progress=_say)
    print("\n".join(report.lines()))


def _synthesize(arguments: Sequence[str]) -> None:
    """Write KuaiRand-format logs of any size, with the published distributions and a learnable structure."""
    from turbogr_plugin.data.synthetic import generate

    parser = _parser("synthesize", _synthesize.__doc__)
    parser.add_function_arguments(generate, None, fail_untyped=True, skip={"progress"})
    namespace = parser.parse_args(arguments)
    values = {key: value for key, value in namespace.as_dict().items() if key != "config"}
    logs = generate(**values, progress=_say)
    print(f"{logs.rows:,} rows of {logs.users:,} users and {logs.items:,} items in {len(logs.files)} files:")
    print("\n".join(map(str, logs.files)))


def _run_config_parser(command: str, description: str | None) -> ArgumentParser:
    from turbogr_plugin.training.config import RunConfig

    parser = _parser(command, description)
    parser.add_class_arguments(RunConfig, None, fail_untyped=True, skip={"profile"})
    # By hand, so that it needs no value.
    parser.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=20,
        default=0,
        help="Write a timeline of this many steps below the run folder (without a number 20); 0 writes none",
    )
    return parser


def _run_config(parser: ArgumentParser, namespace: Namespace, *, own: Sequence[str]) -> RunConfig:
    from turbogr_plugin.training.config import RunConfig

    try:
        values = parser.instantiate(namespace)
    except ValueError as error:  # jsonargparse wraps what a class behind `X | None` raises
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise
    return RunConfig(**{key: value for key, value in vars(values).items() if key not in ("config", *own)})


def _train(arguments: Sequence[str]) -> None:
    """Train a model and leave a run folder; one process, or one of many under torchrun or torchx."""
    parser = _run_config_parser("train", _train.__doc__)
    parser.add_argument(
        "--resume", type=bool, default=False, nargs="?", const=True, help="Go on from the latest checkpoint"
    )
    namespace = parser.parse_args(arguments)
    config = _run_config(parser, namespace, own=["resume"])

    from turbogr_plugin.training.jobs import train

    summary = train(config, resume=namespace.resume)
    if summary is not None:
        print("\n".join(_metric_lines("test", summary["test"])), flush=True)
        print(f"run folder: {config.output}", flush=True)


def _saved_run(command: str, description: str | None, arguments: Sequence[str]) -> tuple[RunConfig, Namespace]:
    """The configuration of a finished run, and the options of a command that uses it."""
    run = ArgumentParser(prog=f"turbogr {command}", description=description, exit_on_error=False, allow_abbrev=False)
    run.add_argument("--run", type=str, required=True, help="Run folder")
    run.add_argument(
        "--checkpoint", type=str, default="best", help='"best", "latest" or the name of a checkpoint folder'
    )
    run.add_argument("--store", type=str, help="Store to use instead of the one the run was trained on")
    if command == "recommend":
        run.add_argument("--users", type=int, nargs="+", required=True, help="Raw user ids")
        run.add_argument("--k", type=int, default=10, help="Items per user")
    namespace = run.parse_args(arguments)
    saved = Path(namespace.run) / "config.yaml"
    if not saved.is_file():
        raise InputError(f"{saved} is missing: --run must be a folder that `turbogr train` has written")
    parser = _run_config_parser(command, None)
    config = _run_config(parser, parser.parse_args([f"--config={saved}"]), own=[])
    config.output = namespace.run
    if namespace.store is not None:
        config.data.store = namespace.store
    return config, namespace


def _evaluate(arguments: Sequence[str]) -> None:
    """Rank the test items of all users with a trained model."""
    config, namespace = _saved_run("evaluate", _evaluate.__doc__, arguments)
    from turbogr_plugin.training.jobs import evaluate

    result = evaluate(config, namespace.checkpoint)
    if result is not None:
        print("\n".join(_metric_lines("test", {"filtered": result.filtered, "unfiltered": result.unfiltered})))


def _recommend(arguments: Sequence[str]) -> None:
    """Print the top K unseen items of users, as raw ids."""
    config, namespace = _saved_run("recommend", _recommend.__doc__, arguments)
    from turbogr_plugin.training.jobs import recommend

    for user, items in recommend(config, namespace.checkpoint, namespace.users, namespace.k):
        print(f"{user}\t{' '.join(map(str, items))}", flush=True)


def _info(arguments: Sequence[str]) -> None:
    """Describe a store or a run folder; without one, the versions of what is installed."""
    from turbogr_plugin import info

    parser = ArgumentParser(prog="turbogr info", description=_info.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("path", type=str, nargs="?", help="A store or a run folder")
    namespace = parser.parse_args(arguments)
    print("\n".join(info.describe(Path(namespace.path)) if namespace.path else info.versions()))


def _dryrun(arguments: Sequence[str]) -> int:
    """Run a training script, unchanged, on a simulated npu and report what would fail or be slow on a real one."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # before torch comes: torch_npu would claim the device
    from turbogr_plugin.simnpu import dryrun

    defaults = dryrun.DryRunSettings()
    # Plain argparse: what follows SCRIPT belongs to the script, whatever it looks like.
    parser = argparse.ArgumentParser(
        prog="turbogr dryrun", description=_dryrun.__doc__, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--devices", type=int, default=defaults.devices, help="Simulated devices (%(default)s)")
    parser.add_argument("--nproc-per-node", type=int, help="Start this many ranks, as torchrun does")
    parser.add_argument("--memory-gb", type=float, default=defaults.memory_gb, help="Of each device (%(default)g)")
    parser.add_argument(
        "--policy",
        choices=dryrun.POLICIES,
        default=defaults.policy,
        help="An operator without a kernel there runs on the CPU and is reported, raises, or runs unseen (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON; the output of the script goes to stderr")
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="Python file; options of dryrun come before it")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="Arguments of the script")
    given = parser.parse_args(arguments)
    settings = dryrun.DryRunSettings(
        devices=given.devices,
        memory_gb=given.memory_gb,
        policy=given.policy,
        nproc_per_node=given.nproc_per_node,
    )
    report = dryrun.run(given.script, given.arguments, settings, output_to_stderr=given.json)
    print(json.dumps(report.as_json(), indent=2) if given.json else "\n".join(report.lines()))
    return 1 if report.reasons else 0


def _doctor(arguments: Sequence[str]) -> int:
    """Say what is installed, what fits what, and which kernels TorchRec's operators get here."""
    from turbogr_plugin import doctor

    parser = ArgumentParser(prog="turbogr doctor", description=_doctor.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="Print JSON")
    parser.add_argument("--operators", action="store_true", help="Print a row for every operator")
    given = parser.parse_args(arguments)
    diagnosis = doctor.diagnose()
    if given.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print("\n".join(diagnosis.lines(every_operator=given.operators)))
    return 1 if diagnosis.problems else 0


def _run_module(
    command: str, module: ModuleType, description: str | None, arguments: Sequence[str]
) -> tuple[argparse.Namespace, Any]:
    """Runs a command whose options and work stand in a module of their own: what was given, and what came out."""
    parser = argparse.ArgumentParser(
        prog=f"turbogr {command}", description=description, exit_on_error=False, allow_abbrev=False
    )
    module.add_arguments(parser)
    given = parser.parse_args(arguments)
    try:
        return given, module.run(given)
    except ValueError as error:
        raise InputError(str(error)) from error


def _plan(arguments: Sequence[str]) -> None:
    """Predict steps of the paper's models on clusters of growing size, and how their tables are sharded."""
    from turbogr_plugin.sharding import plan_command

    given, report = _run_module("plan", plan_command, _plan.__doc__, arguments)
    print(json.dumps(report.as_json(), indent=2) if given.json else "\n".join(report.lines()))


def _measure_links(arguments: Sequence[str]) -> None:
    """Time the links between the ranks that run this, and write a topology for the planner."""
    from turbogr_plugin.sharding import measure_links_command

    given, measured = _run_module("measure-links", measure_links_command, _measure_links.__doc__, arguments)
    if measured is not None:
        print("\n".join([*measured.lines(), f"written to {given.output}"]))


def _build(arguments: Sequence[str]) -> None:
    """Build the C++ kernels now, which are otherwise built when they are first used."""
    from turbogr_plugin.kernels.cpu import build

    parser = ArgumentParser(prog="turbogr build", description=_build.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("families", type=str, nargs="*", help="Operator families (all)", metavar="FAMILY")
    known = build.families()
    families = parser.parse_args(arguments).families or known
    for family in families:
        if family not in known:
            raise InputError(f"FAMILY must be one of {', '.join(known)}, got {family!r}")
    for family in families:
        start = time.monotonic()
        try:
            build.load(family)
        except RuntimeError as error:
            raise InputError(str(error)) from error
        print(f"{family}: ready after {time.monotonic() - start:.0f} s", flush=True)
    print("\n".join(f"{name}: {path}" for name, path in build.describe().items()))


def _metric_lines(name: str, metrics: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for kind, label in (("filtered", "seen items filtered"), ("unfiltered", "unfiltered")):
        values = ", ".join(f"{metric.upper()} {value:.4f}" for metric, value in metrics[kind].items())
        lines.append(f"{name} ({label}): {values}")
    return lines


COMMANDS: dict[str, Command] = {
    "prepare": _prepare,
    "synthesize": _synthesize,
    "train": _train,
    "evaluate": _evaluate,
    "recommend": _recommend,
    "info": _info,
    "dryrun": _dryrun,
    "doctor": _doctor,
    "plan": _plan,
    "measure-links": _measure_links,
    "build": _build,
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {command.__doc__}" for name, command in COMMANDS.items())
    return f"usage: turbogr COMMAND [options]\n\n{listed}\n\n`turbogr COMMAND --help` shows the options of a command."


def _refuse(message: str) -> int:
    """Says what the user can mend; returns the exit code.

    Ranks refuse bad input together, so rank 0 speaks for all. torchrun ends its report with what a failed rank has left
    in the file that TORCHELASTIC_ERROR_FILE names: there the message comes last, also that of a rank that fails alone.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(error_file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if not error_file or os.environ.get("RANK", "0") == "0":
        _say(message)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    if given[0] == "--version":
        print(__version__)
        return 0
    if given[0] not in COMMANDS:
        _say(f"turbogr: unknown command {given[0]!r}: use one of {', '.join(COMMANDS)}")
        return 2
    code = 0
    try:
        code = COMMANDS[given[0]](given[1:]) or 0
    except InputError as error:
        return _refuse(f"turbogr {given[0]}: {error}")
    except argparse.ArgumentError as error:
        return _refuse(f"turbogr {given[0]}: {error}. `turbogr {given[0]} --help` shows the options.")
    except UnicodeDecodeError as error:
        return _refuse(f"turbogr {given[0]}: a configuration file is not UTF-8 text ({error.reason} at {error.start})")
    except OSError as error:
        if error.errno not in _MENDABLE:
            raise
        return _refuse(f"turbogr {given[0]}: {error.strerror}: {error.filename or 'the output'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
