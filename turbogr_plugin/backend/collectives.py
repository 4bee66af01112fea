"""Process groups: which backend a device type talks through, start and end, and agreement of all ranks on an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # dist.HashStore, for type checkers

from turbogr_plugin.errors import InputError

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta) -> Iterator[dist.ProcessGroup]:
    """The world's process group for the life of the block.

    Under a launcher (torchrun and cluster operators set RANK and WORLD_SIZE) the ranks find each other through the
    environment; without one the process is a world of its own and opens no port.

    Args:
        device: decides the backend.
        timeout: after which a collective that some rank does not join fails on the others.

    Raises:
        InputError: a device type without a known backend.
    """
    backend = BACKENDS.get(device.type)
    if backend is None:
        raise InputError(f"device {device.type!r} has no communication backend: use one of {', '.join(BACKENDS)}")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """After which a collective of the group fails; torch gives a new group half an hour, whatever others have."""
    devices = {device.type: device for device in group._device_types}
    backend: Any = group._get_backend(devices.get("cpu", group._device_types[0]))
    timeout: timedelta = backend.options._timeout
    return timeout


def group_of_same_ranks(group: dist.ProcessGroup, description: str) -> dist.ProcessGroup:
    """The ranks of a group once more, so that two threads can each issue collectives; a collective of them.

    Args:
        group: whose timeout the new one has; a group of one rank needs no other and is returned itself.
        description: shown in messages of torch.
    """
    if group.size() == 1:
        return group
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        use_local_synchronization=True,
        group_desc=description,
    )
    assert made is not None
    return made


def ranks_per_host(group: dist.ProcessGroup) -> int:
    """Ranks of this host, as the launcher tells them (LOCAL_WORLD_SIZE); without a launcher all share one host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))


def ranks_of_hosts(group: dist.ProcessGroup) -> list[int]:
    """`ranks_per_host` of every rank; a collective."""
    found: list[int] = [0] * group.size()
    dist.all_gather_object(found, ranks_per_host(group), group=group)
    return found


def check_ranks_per_host(planned: int | None, group: dist.ProcessGroup) -> None:
    """Raises where a host has fewer ranks than a plan counts on; a collective of all ranks.

    Traffic that the plan holds for that of a host would cross the network. More ranks on a host do no harm, and the
    last host of a topology may have fewer than the others.

    Args:
        planned: ranks of a host in the plan's topology, consecutive; None: the plan does not say.
        group: of all ranks.

    Raises:
        ValueError: on every rank, with the same message, also where ranks bring different plans.
    """
    told: list[tuple[int | None, int]] = [(None, 0)] * group.size()
    dist.all_gather_object(told, (planned, ranks_per_host(group)), group=group)
    plans, found = zip(*told, strict=True)
    known = [each for each in plans if each is not None]
    if not known:
        return
    if len(set(plans)) > 1:
        raise ValueError(f"all ranks must have one plan, got plans for {list(plans)} ranks per host")
    each, world = known[0], group.size()
    lacking = [rank for rank, here in enumerate(found) if here < min(each, world - rank // each * each)]
    if lacking:
        least = min(found[rank] for rank in lacking)
        raise ValueError(
            f"the plan's topology has {each} ranks per host, but rank {lacking[0]} runs on a host with "
            f"{found[lacking[0]]} ({len(lacking)} of {world} ranks lack some): start {each} ranks on each host, or "
            f"plan for a topology with {least}"
        )


def on_first_rank(work: Callable[[], T], group: dist.ProcessGroup) -> T | None:
    """Runs `work`, which must not communicate, on rank 0 while the others wait.

    Returns:
        the result on rank 0, None elsewhere.

    Raises:
        InputError: that of `work`, with the same message on all ranks.
        Exception: any other of `work` on rank 0; RuntimeError with its message on the others, so that nobody waits for
            the timeout.
    """
    result: T | None = None
    failure: Exception | None = None
    if group.rank() == 0:
        try:
            result = work()
        except Exception as error:
            failure = error
    report = [None if failure is None else (isinstance(failure, InputError), f"{failure}")]
    if group.size() > 1:
        dist.broadcast_object_list(report, src=dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    if report[0] is not None:
        is_input, message = report[0]
        raise InputError(message) if is_input else RuntimeError(f"rank 0 failed: {message}")
    return result
