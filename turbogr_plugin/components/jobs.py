"""TorchX components: `torchx run turbogr.train`, `turbogr.evaluate` and `turbogr.prepare`.

Each launches the `turbogr` command of the same name; what the command can do is documented there. TorchX shows the
Args sections below as the help of `torchx run turbogr.NAME --help`.

This module has no `from __future__ import annotations` and writes `Optional[Dict[...]]`: TorchX reads the annotations
both as objects (a string annotation breaks its decoding) and from the source text (where it knows nothing newer).
"""

import re
from pathlib import Path
from typing import Dict, Optional

from torchx.specs import AppDef, macros

from turbogr_plugin.components.launcher import ranks_app, single_app
from turbogr_plugin.errors import InputError

_CLI = ("-m", "turbogr_plugin.cli")


def train(
    *overrides: str,
    config: str,
    j: str = "1x2",
    output: str = "",
    resume: bool = False,
    env: Optional[Dict[str, str]] = None,
    python: str = "",
    threads: int = 1,
    rdzv_port: int = 29500,
) -> AppDef:
    """Trains a model: one process per rank under torch.distributed.run.

    Args:
        overrides: settings over those of the config file, after `--`, such as `-- --training.epochs 3`
        config: the configuration file (YAML)
        j: NODESxRANKS, or RANKS on one node
        output: the run folder; by default a new one, runs/<id of this launch>
        resume: True continues from the last complete checkpoint of the run folder, which --output must then name
        env: environment variables of the ranks (ENV1=v1,ENV2=v2)
        python: interpreter on the nodes; by default the one that runs torchx
        threads: CPU threads per rank
        rdzv_port: port of the first node where several nodes meet
    """
    if resume and not output:
        raise InputError("resume=True: --output must name the run folder to continue")
    name = re.sub(r"[^a-z0-9-]+", "-", Path(config).stem.lower()).strip("-") or "train"
    program = [*_CLI, "train", "--config", config, "--output", output or f"runs/{macros.app_id}"]
    if resume:
        program.append("--resume")
    return ranks_app(name, [*program, *overrides], j=j, env=env, python=python, threads=threads, rdzv_port=rdzv_port)


def evaluate(
    *arguments: str,
    j: str = "1x2",
    env: Optional[Dict[str, str]] = None,
    python: str = "",
    threads: int = 1,
    rdzv_port: int = 29500,
) -> AppDef:
    """Evaluates a trained model, with the corpus sharded over the ranks.

    Args:
        arguments: the arguments of `turbogr evaluate`, after `--`
        j: NODESxRANKS, or RANKS on one node
        env: environment variables of the ranks (ENV1=v1,ENV2=v2)
        python: interpreter on the nodes; by default the one that runs torchx
        threads: CPU threads per rank
        rdzv_port: port of the first node where several nodes meet
    """
    program = [*_CLI, "evaluate", *arguments]
    return ranks_app("evaluate", program, j=j, env=env, python=python, threads=threads, rdzv_port=rdzv_port)


def prepare(*arguments: str, env: Optional[Dict[str, str]] = None, python: str = "") -> AppDef:
    """Turns interaction logs into a store, in one process that uses the cores of its machine.

    Args:
        arguments: the arguments of `turbogr prepare`, after `--`
        env: environment variables (ENV1=v1,ENV2=v2)
        python: interpreter on the node; by default the one that runs torchx
    """
    return single_app("prepare", [*_CLI, "prepare", *arguments], env=env, python=python)
