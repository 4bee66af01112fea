"""One process; two processes find each other through process_group in training/test_gradient_scale.py."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from turbogr_plugin.backend.collectives import on_first_rank, process_group, timeout_of
from turbogr_plugin.errors import InputError

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_without_a_launcher_is_a_world_of_its_own() -> None:
    with process_group(CPU, timeout=TIMEOUT) as group:
        assert (group.rank(), group.size()) == (0, 1)
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [1, 1, 1]
        assert on_first_rank(lambda: "done", group) == "done"
    assert not dist.is_initialized()


def test_a_group_tells_its_timeout_which_new_groups_do_not_take_over() -> None:
    with process_group(CPU, timeout=TIMEOUT) as group:
        assert timeout_of(group) == TIMEOUT
        assert timeout_of(dist.new_group()) > TIMEOUT
        assert timeout_of(dist.new_group(timeout=TIMEOUT)) == TIMEOUT


def test_the_group_ends_with_the_block_also_by_an_error() -> None:
    for _ in range(2):
        with pytest.raises(InputError, match="bad store"), process_group(CPU, timeout=TIMEOUT) as group:
            on_first_rank(_refuse, group)
        assert not dist.is_initialized()


def _refuse() -> None:
    raise InputError("bad store")


def test_a_launcher_that_says_too_little_is_an_error_and_no_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="MASTER_ADDR"), process_group(CPU, timeout=TIMEOUT):
        pass
    assert not dist.is_initialized()


def test_a_device_without_a_backend_is_refused() -> None:
    refused = pytest.raises(InputError, match="'meta' has no communication backend: use one of cpu, cuda, npu")
    with refused, process_group(torch.device("meta"), timeout=TIMEOUT):
        pass
