"""What README and docs name is there: links, imports, and the quickstart from the first line to the timeline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICKSTART = "docs/quickstart.py"

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_IMPORT = re.compile(r"^    from (?:turbogr_plugin|torchrec)[\w.]* import (?:\([^)]*\)|[^(\n]+)$", re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    missing = []
    for link in _LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            missing.append(link)
    assert not missing


def test_every_import_of_readme_and_docs_works() -> None:
    found = [(page.name, match) for page in PAGES for match in _IMPORT.findall(page.read_text())]
    assert len(found) > 20
    code = "\n".join(re.sub(r"^    ", "", statement, flags=re.MULTILINE) for _, statement in found)
    # In a process of its own, as a reader's is: nothing was imported before.
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=110)


def _quickstart(*arguments: str) -> str:
    """What the quickstart prints on two ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launch, QUICKSTART, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    ).stdout


def _losses(printed: str) -> list[str]:
    return sorted(re.findall(r"rank \d: last loss [\d.]+", printed))


@pytest.mark.timeout(240)
def test_the_quickstart_trains_as_torchrec_and_writes_its_timeline(tmp_path: Path) -> None:
    ours = _quickstart("--timeline", str(tmp_path / "timeline"))
    assert len(_losses(ours)) == 2
    assert _losses(ours) == _losses(_quickstart("--stock"))
    assert "exposed communication" in ours
    assert {path.name for path in (tmp_path / "timeline").iterdir()} == {
        "timeline.json",
        "timeline.png",
        "timeline_trace.json",
    }
