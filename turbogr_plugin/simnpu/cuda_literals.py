"""Where sources name CUDA: `torch.cuda`, `.cuda()`, and the strings "cuda", "cuda:0", "nccl".

A script that is to run on another device has to be rid of them, or to guard them. The sources are read by their syntax
tree and not run, so that lines which a dry run has not reached are found too.

Left out: names that are put together at run time, and aliases (`c = torch.cuda`, then `c.synchronize()`): only the line
of the alias is found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_STRING = re.compile(r"cuda(:\d*)?|nccl|(\w+:\w+,)*cuda:nccl(,\w+:\w+)*")


@dataclass(frozen=True, order=True)
class CudaLiteral:
    """One place in a source."""

    path: str
    line: int
    text: str
    """What stands there, shortened to the name or string itself."""


def find(path: Path) -> list[CudaLiteral]:
    """The places in one source, by line; none in a file that is not Python."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError):
        return []
    return sorted({CudaLiteral(str(path), line, text) for line, text in _places(tree)})


def imported_from_folder(script: Path) -> list[Path]:
    """The script and the modules beside it that it imports, directly or through each other."""
    found: dict[Path, None] = {}
    waiting = [script]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        waiting.extend(_local_sources(_imported_names(tree, path, script.parent), script.parent))
    return list(found)


def _places(tree: ast.AST) -> Iterator[tuple[int, str]]:
    inner: set[ast.AST] = set()  # parts of a chain or call that is already told
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {name.name}") for name in node.names if _is_cuda_module(name.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for name in node.names:
                if _is_cuda_module(node.module) or _is_cuda_module(f"{node.module}.{name.name}"):
                    yield node.lineno, f"from {node.module} import {name.name}"
        elif isinstance(node, ast.Attribute) and node not in inner:
            chain = _dotted(node)
            if _is_cuda_module(chain):
                inner.update(ast.walk(node))
                yield node.lineno, chain
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield node.func.end_lineno or node.lineno, ".cuda()"
        elif isinstance(node, ast.JoinedStr):
            first = node.values[0] if node.values else None
            text = _text(first)
            if first is not None and text.startswith("cuda:"):
                inner.add(first)
                yield node.lineno, f'"{text}..."'
        elif node not in inner and _STRING.fullmatch(_text(node)):
            assert isinstance(node, ast.Constant)
            yield node.lineno, f'"{_text(node)}"'


def _text(node: ast.AST | None) -> str:
    """The value of a string, "" of anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_cuda_module(name: str) -> bool:
    return name == "torch.cuda" or name.startswith("torch.cuda.")


def _dotted(node: ast.expr) -> str:
    """The name that a chain of attributes spells ("torch.cuda.Stream"), "" for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed([*names, node.id])) if isinstance(node, ast.Name) else ""


def _imported_names(tree: ast.AST, path: Path, root: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.parent
                for _ in range(node.level - 1):
                    package = package.parent
                if not package.is_relative_to(root):
                    continue
                base = ".".join([*package.relative_to(root).parts, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{name.name}".lstrip(".") for name in node.names)


def _local_sources(names: Iterable[str], root: Path) -> Iterator[Path]:
    for name in names:
        parts = name.split(".") if name else []
        for depth in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:depth])
            for candidate in (place.with_suffix(".py"), place / "__init__.py"):
                if candidate.is_file():
                    yield candidate
