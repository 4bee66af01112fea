"""Keeps these tests to `make ascend`, and starts its compilers: two at a time, while other tests run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    version("triton-ascend")
except PackageNotFoundError:
    collect_ignore_glob = ["*.py"]  # `make test` runs in the environment without the compilers


@pytest.fixture(scope="session", autouse=True)
def scheduled(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[str]]]:
    """(name of the case, SoC) -> the scheduled module to come, or the LoweringError.

    Made for every test, so that the longest work begins before the first one.
    """
    from tests.ascend.kernel_cases import SOCS, all_cases
    from tests.ascend.lowering import linalg_ir, scheduled_hivm

    selected = [item.name for item in request.session.items]
    futures: dict[tuple[str, str], Future[str]] = {}
    with ThreadPoolExecutor(2) as pool:
        for case in all_cases():
            if not any(f"[{case.name}-" in name for name in selected):
                continue
            # The frontend runs here: it is quick, and not made for threads.
            linalg = linalg_ir(case.kernel)
            for soc in SOCS:
                futures[case.name, soc] = pool.submit(scheduled_hivm, linalg, soc)
        yield futures
        pool.shutdown(cancel_futures=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels run while the compilers work; their results are looked at last."""
    items.sort(key=lambda item: "test_lowering.py" in item.nodeid)
