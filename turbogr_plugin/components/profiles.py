"""Checks TorchX profiles: every section, key and value of a `.torchxconfig` or `.torchx/*.ini` file.

TorchX drops a key it does not know (of a scheduler with a log line, of a component or of the command line without a
word), and the job then runs with other settings than the ones written down. `profile_problems` names each such place.
It checks what is installed here: a profile for a scheduler whose client library is missing is reported as unchecked.
Left out: TorchX's tracker sections; no profile here uses them, and they are reported as unknown.
"""

from __future__ import annotations

import argparse
import configparser
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchx.cli.argparse_util import torchxconfig_run
from torchx.cli.cmd_run import CmdRun
from torchx.schedulers import get_scheduler_factories
from torchx.specs.finder import get_components
from torchx.util.types import decode, decode_optional, is_bool, is_primitive


def profile_files(root: Path) -> list[Path]:
    """The default profile of a checkout and all it holds in `.torchx/`, by name."""
    folder = root / ".torchx"
    return [root / ".torchxconfig", *sorted(path for path in folder.iterdir() if path.is_file())]


def profile_problems(path: Path) -> list[str]:
    """Finds what TorchX would ignore or misread in a profile.

    Args:
        path: An INI file as TorchX reads it: keys are case-sensitive.

    Returns:
        One line per problem, naming file, section, key and what is allowed; empty when all is well.

    Raises:
        OSError: The file cannot be read.
    """
    profile = configparser.ConfigParser()
    profile.optionxform = str  # type: ignore[assignment,method-assign]  # TorchX keeps the case of keys too
    try:
        profile.read_string(path.read_text(encoding="utf-8"), source=str(path))
        sections = {name: dict(profile.items(name)) for name in profile.sections()}
    except configparser.Error as error:
        return [f"{path}: not an INI file TorchX can read: {error}"]
    problems = [f"[DEFAULT]: {key} would be set in every section" for key in profile.defaults()]
    for section, settings in sections.items():
        kind, _, name = section.partition(":")
        if kind == "cli" and name == "run":
            found = _run_problems(settings)
        elif kind == "component" and name:
            found = _component_problems(name, settings)
        elif not name:
            found = _scheduler_problems(section, settings)
        else:
            found = ["unknown section; known are [cli:run], [component:NAME] and [SCHEDULER]"]
        problems += [f"[{section}]: {problem}" for problem in found]
    return [f"{path}: {problem}" for problem in problems]


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"unknown {name}; known are {', '.join(sorted(known))}"


def _run_problems(settings: dict[str, str]) -> list[str]:
    """`torchx run` takes from a profile what its parser marks so, and `component`."""
    parser = argparse.ArgumentParser()
    CmdRun().add_arguments(parser)
    keys = {action.dest for action in parser._actions if isinstance(action, torchxconfig_run)} | {"component"}
    problems = [_unknown(key, keys) for key in settings if key not in keys]
    known_values = {"component": get_components(), "scheduler": get_scheduler_factories()}
    for key, known in known_values.items():
        if key in settings and settings[key] not in known:
            problems.append(f"{key} = {settings[key]}: " + _unknown(key, known))
    return problems


def _component_problems(name: str, settings: dict[str, str]) -> list[str]:
    components = get_components()
    if name not in components:
        return [_unknown(f"component {name}", components)]
    parameters = inspect.signature(components[name].fn).parameters
    problems = []
    for key, value in settings.items():
        if key not in parameters:
            problems.append(_unknown(key, parameters))
            continue
        kind = decode_optional(parameters[key].annotation)
        if not _decodes(value, kind):
            problems.append(f"{key} = {value}: not a {_type_name(kind)}")
    return problems


def _scheduler_problems(name: str, settings: dict[str, str]) -> list[str]:
    factories = get_scheduler_factories()
    if name not in factories:
        return [_unknown(f"scheduler {name}", factories)]
    try:
        options = dict(iter(factories[name](session_name="profile-check").run_opts()))
    except ModuleNotFoundError as error:
        return [f"unchecked, the scheduler needs the module {error.name}"]
    problems = []
    for key, value in settings.items():
        if key not in options:
            problems.append(_unknown(key, options))
        elif value != "None" and not _decodes(value, options[key].opt_type):  # TorchX's own spelling of "unset"
            problems.append(f"{key} = {value}: not a {_type_name(options[key].opt_type)}")
    return problems


def _decodes(value: str, kind: Any) -> bool:
    """Whether TorchX turns the text into the type; for a bool it would take any text but "true" for False."""
    if is_bool(kind):
        return value.lower() in ("true", "false")
    try:
        if is_primitive(kind):
            kind(value)
        else:
            decode(value, kind)
    except ValueError:
        return False
    return True


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
