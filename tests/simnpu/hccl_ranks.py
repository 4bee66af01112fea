"""One rank of the tests of `hccl`: each case runs on CPU tensors through gloo and on npu tensors through hccl.

Run under torchrun; writes {case: "" or what went wrong} of this rank to `outcomes-RANK.json`. Values are small
integers, so that every order of summation gives the same bits in every dtype.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import turbogr_plugin.simnpu as simnpu
from tests.simnpu import hccl_sizes
from tests.simnpu.hccl_sizes import Group, refused

Case = Callable[[Group, torch.device], Any]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)


def values(group: Group, device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers that differ by rank, made on the CPU so that both devices get the same."""
    generator = torch.Generator().manual_seed(7 + group.rank())
    return torch.randint(1, 4, shape, generator=generator).to(dtype).to(device)


def all_reduce(group: Group, device: torch.device, *, op: Any, dtype: torch.dtype) -> Tensor:
    x = values(group, device, 3, 5, dtype=dtype)
    dist.all_reduce(x, op=op, group=group)
    return x


def all_reduce_odd_shapes(group: Group, device: torch.device) -> list[Tensor]:
    scalar, empty = values(group, device)[()], values(group, device, 0, 3)
    dist.all_reduce(scalar, group=group)
    dist.all_reduce(empty, group=group)
    return [scalar, empty]


def all_reduce_coalesced(group: Group, device: torch.device) -> list[Tensor]:
    tensors = [values(group, device, n) for n in (3, 1, 8)]
    dist.all_reduce_coalesced(tensors, group=group)
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


def broadcast(group: Group, device: torch.device, *, dtype: torch.dtype) -> list[Tensor]:
    tensors = [
        values(group, device, 4, dtype=dtype),
        values(group, device, 3, 4, dtype=dtype).t(),
        values(group, device, 0),
    ]
    for tensor in tensors:
        dist.broadcast(tensor, group_src=1, group=group)
    return tensors


def reduce(group: Group, device: torch.device, *, op: Any) -> Tensor | None:
    x = values(group, device, 5)
    dist.reduce(x, group_dst=1, op=op, group=group)
    return x if group.rank() == 1 else None  # elsewhere undefined


def all_gather(group: Group, device: torch.device, *, dtype: torch.dtype) -> list[Tensor]:
    x = values(group, device, 2, 3, dtype=dtype)
    outputs = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(outputs, x.t().contiguous().t(), group=group)
    single = torch.empty(2 * group.size(), 3, dtype=dtype, device=device)
    dist.all_gather_into_tensor(single, x, group=group)
    return [*outputs, single]


def all_gather_coalesced(group: Group, device: torch.device) -> list[Tensor]:
    inputs = [values(group, device, n) for n in (2, 5)]
    outputs = [torch.empty(n * group.size(), device=device) for n in (2, 5)]
    with dist.distributed_c10d._coalescing_manager(group):
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor, group=group)
    lists = [[torch.empty(n, device=device) for n in (2, 5)] for _ in range(group.size())]
    dist.all_gather_coalesced(lists, inputs, group=group)
    return [*outputs, *(tensor for of_rank in lists for tensor in of_rank)]


def reduce_scatter(group: Group, device: torch.device, *, op: Any, dtype: torch.dtype) -> list[Tensor]:
    x = values(group, device, 3 * group.size(), 2, dtype=dtype)
    single = torch.empty(3, 2, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(single, x, op=op, group=group)
    output = torch.empty(3, 2, dtype=dtype, device=device)
    dist.reduce_scatter(output, list(x.chunk(group.size())), op=op, group=group)
    empty = torch.empty(0, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(empty, torch.empty(0, dtype=dtype, device=device), op=op, group=group)
    return [single, output, empty]


def reduce_scatter_of_unequal_chunks(group: Group, device: torch.device) -> Tensor:
    chunks = list(values(group, device, sum(range(1, group.size() + 1))).split(list(range(1, group.size() + 1))))
    output = torch.empty(group.rank() + 1, device=device)
    dist.reduce_scatter(output, chunks, group=group)
    return output


def reduce_scatter_coalesced(group: Group, device: torch.device) -> list[Tensor]:
    inputs = [values(group, device, n * group.size()) for n in (2, 5)]
    outputs = [torch.empty(n, device=device) for n in (2, 5)]
    with dist.distributed_c10d._coalescing_manager(group):
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, tensor, group=group)
    return outputs


def all_to_all_single(group: Group, device: torch.device, *, dtype: torch.dtype) -> list[Tensor]:
    n, rank = group.size(), group.rank()
    x = values(group, device, 2 * n, 3, dtype=dtype)
    even = torch.empty_like(x)
    dist.all_to_all_single(even, x, group=group)
    # Rank r sends r + s rows to rank s: none from rank 0 to itself.
    sizes = [rank + other for other in range(n)]
    uneven = torch.empty(sum(sizes), 3, dtype=dtype, device=device)
    dist.all_to_all_single(uneven, values(group, device, sum(sizes), 3, dtype=dtype), sizes, sizes, group=group)
    return [even, uneven]


def all_to_all_single_where_ranks_have_nothing(group: Group, device: torch.device) -> list[Tensor]:
    n, rank = group.size(), group.rank()
    sent = [3 if rank == 0 else 0] * n  # only rank 0 sends
    received = [3 if other == 0 else 0 for other in range(n)]
    x = values(group, device, sum(sent))
    output = torch.empty(3, device=device)
    dist.all_to_all_single(output, x, received, sent, group=group)
    nothing = torch.empty(0, 4, device=device)
    dist.all_to_all_single(nothing, torch.empty(0, 4, device=device), [0] * n, [0] * n, group=group)
    return [output, nothing]


def all_to_all(group: Group, device: torch.device) -> list[Tensor]:
    n = group.size()
    outputs = [torch.empty(2, 2, device=device) for _ in range(n)]
    dist.all_to_all(outputs, list(values(group, device, 2 * n, 2).chunk(n)), group=group)
    return outputs


def gather_and_scatter(group: Group, device: torch.device) -> list[Tensor]:
    n, root = group.size(), group.rank() == 1
    x = values(group, device, 4)
    gathered = [torch.empty_like(x) for _ in range(n)] if root else None
    dist.gather(x, gathered, group_dst=1, group=group)
    output = torch.empty(3, device=device)
    dist.scatter(output, list(values(group, device, 3 * n).chunk(n)) if root else None, group_src=1, group=group)
    return [output, *(gathered or [])]


def send_and_receive(group: Group, device: torch.device) -> list[Tensor]:
    n, rank = group.size(), group.rank()
    x, ring, pair = values(group, device, 1000), torch.empty(1000, device=device), torch.empty(2, 2, device=device)
    # Everybody sends before anybody receives.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, ring, group=group, group_peer=(rank - 1) % n),
        ]
    )
    for work in works:
        work.wait()
    if rank == 0:
        dist.send(x[:4].view(2, 2), group_dst=1, group=group, tag=3)
    elif rank == 1:
        dist.recv(pair, group_src=0, group=group, tag=3)
    return [ring, pair] if rank == 1 else [ring]


def functional(group: Group, device: torch.device) -> list[Tensor]:
    import torch.distributed._functional_collectives as functional_collectives

    x = values(group, device, 2 * group.size(), 2)
    return [
        functional_collectives.all_reduce(x, "sum", group) + 1,
        functional_collectives.all_gather_tensor(x, 0, group) + 1,
        functional_collectives.reduce_scatter_tensor(x, "avg", 0, group) + 1,
        functional_collectives.all_to_all_single(x, None, None, group) + 1,
        *functional_collectives.all_reduce_coalesced([x, x[0]], "max", group),
    ]


def device_mesh(group: Group, device: torch.device) -> list[Tensor]:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.DeviceMesh.from_group(group, device.type)
    x = values(group, device, 2 * group.size() + 1, 3)
    dist.broadcast(x, group_src=0, group=group)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    product = sharded @ distribute_tensor(torch.ones(3, 2, device=device), mesh, [Replicate()])
    assert isinstance(product, DTensor)
    return [product.full_tensor(), sharded.redistribute(mesh, [Shard(1)]).to_local(), product.sum().full_tensor()]


def data_parallel(group: Group, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1)).to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = (values(group, device, 4, 5) + step) / 4
        loss = (parallel(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def checkpoint(group: Group, device: torch.device) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = f"checkpoint-{device.type}-{dist.get_process_group_ranks(group)}"  # the pairs save at the same time
    mesh = dist.device_mesh.DeviceMesh.from_group(group, device.type)
    whole = torch.arange(24.0).view(8, 3).to(device)
    state = {"table": distribute_tensor(whole, mesh, [Shard(0)]), "bias": whole[0] + 1}
    dcp.save(state, checkpoint_id=folder, process_group=group)
    loaded = {
        "table": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]),
        "bias": torch.zeros(3, device=device),
    }
    dcp.load(loaded, checkpoint_id=folder, process_group=group)
    return [loaded["table"].full_tensor(), loaded["bias"]]  # type: ignore[attr-defined]


EQUAL_TO_GLOO: dict[str, Case] = {
    **{
        f"all_reduce {op} {dtype}": partial(all_reduce, op=getattr(ReduceOp, op), dtype=dtype)
        for dtype in DTYPES
        for op in (("SUM", "MAX", "MIN", "PRODUCT", "AVG") if dtype.is_floating_point else ("SUM", "MAX"))
    },
    "all_reduce of a scalar and of nothing": all_reduce_odd_shapes,
    "all_reduce of many": all_reduce_coalesced,
    **{f"broadcast {dtype}": partial(broadcast, dtype=dtype) for dtype in (*DTYPES, torch.bool, torch.complex64)},
    **{f"reduce {op}": partial(reduce, op=getattr(ReduceOp, op)) for op in ("SUM", "AVG", "MAX")},
    **{f"all_gather {dtype}": partial(all_gather, dtype=dtype) for dtype in (*DTYPES, torch.bool)},
    "all_gather of many": all_gather_coalesced,
    **{
        f"reduce_scatter {op} {dtype}": partial(reduce_scatter, op=getattr(ReduceOp, op), dtype=dtype)
        for op, dtype in (
            *(("SUM", dtype) for dtype in DTYPES),
            *(("AVG", dtype) for dtype in FLOATS),
            ("MAX", torch.float32),
            ("MIN", torch.int64),
        )
    },
    "reduce_scatter of unequal chunks": reduce_scatter_of_unequal_chunks,
    "reduce_scatter of many": reduce_scatter_coalesced,
    **{f"all_to_all_single {dtype}": partial(all_to_all_single, dtype=dtype) for dtype in (*DTYPES, torch.bool)},
    "all_to_all_single where ranks have nothing": all_to_all_single_where_ranks_have_nothing,
    "all_to_all": all_to_all,
    "gather and scatter": gather_and_scatter,
    "send and receive": send_and_receive,
    "functional collectives": functional,
    "DTensor on a mesh": device_mesh,
    "distributed data parallel": data_parallel,
    "distributed checkpoint": checkpoint,
}


def int16_sum_and_integer_average(group: Group, device: torch.device) -> None:
    small = torch.full((3,), 300, dtype=torch.int16, device=device)
    dist.all_reduce(small, group=group)
    assert small.tolist() == [300 * group.size()] * 3
    average = torch.full((2,), -1 - group.rank(), device=device)
    dist.all_reduce(average, op=ReduceOp.AVG, group=group)
    assert average.tolist() == [-(sum(range(1, group.size() + 1)) // group.size())] * 2


def parts_that_are_not_contiguous(group: Group, device: torch.device) -> None:
    # gloo takes the memory behind such a CPU tensor as if it were dense, so it is no oracle here.
    n = group.size()
    x = torch.arange(24.0, device=device).view(6, 4)
    expected = torch.arange(24.0).view(6, 4)
    expected[:, 1:3] *= n
    expected[::2, 3] *= n
    dist.all_reduce(x.t()[1:3], group=group)
    dist.all_reduce(x[::2, 3], group=group)
    assert torch.equal(x.cpu(), expected), x
    gathered = torch.zeros(2 * n, 6, device=device)
    dist.all_gather_into_tensor(gathered.t()[:, :n].t(), x[:, 0][None], group=group)
    assert torch.equal(gathered[:n].cpu(), expected[:, 0].expand(n, 6)), gathered
    assert not gathered[n:].any(), gathered


def objects(group: Group, device: torch.device) -> None:
    n, rank = group.size(), group.rank()
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    assert gathered == [{"rank": other} for other in range(n)]
    told: list[Any] = ["rank 1", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, group_src=1, group=group)
    assert told == ["rank 1", 1]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(range(n)) if rank == 0 else None, group_src=0, group=group)
    assert scattered == [rank]
    collected = [None] * n if rank == 0 else None
    dist.gather_object(rank, collected, group_dst=0, group=group)
    assert rank != 0 or collected == list(range(n))
    dist.barrier(group=group)


def no_wait_is_found(group: Group, device: torch.device) -> None:
    x = torch.ones(64, device=device)
    simnpu.reset()
    work = dist.all_reduce(x, group=group, async_op=True)
    y = x + 1
    assert [race.kind for race in simnpu.races()] == ["read before write ended"], simnpu.races()
    assert simnpu.races()[0].earlier.operator == "hccl::allreduce"
    work.wait()
    del y


def overwriting_an_input_is_found(group: Group, device: torch.device) -> None:
    x, output = torch.ones(64, device=device), torch.empty(64 * group.size(), device=device)
    simnpu.reset()
    work = dist.all_gather_into_tensor(output, x, group=group, async_op=True)
    x.zero_()
    assert [race.kind for race in simnpu.races()] == ["write before reader ended"], simnpu.races()
    work.wait()


def waiting_on_another_stream_is_not_enough(group: Group, device: torch.device) -> None:
    x = torch.ones(64, device=device)
    simnpu.reset()
    side = torch.npu.Stream()
    work = dist.all_reduce(x, group=group, async_op=True)
    with torch.npu.stream(side):
        work.wait()
        y = x * 2
    assert not simnpu.races()
    z = x * 3
    assert [race.kind for race in simnpu.races()] == ["read before write ended"], simnpu.races()
    del y, z


def waiting_orders_and_costs_no_host_sync(group: Group, device: torch.device) -> None:
    x, output = torch.ones(64, device=device), torch.empty(64 * group.size(), device=device)
    simnpu.reset()
    before = simnpu.counters()
    dist.all_reduce(x, group=group)
    work = dist.all_gather_into_tensor(output, x, group=group, async_op=True)
    work.wait()
    received = torch.empty_like(x)
    if group.rank() < 2:
        operation = dist.P2POp(
            dist.isend if group.rank() == 0 else dist.irecv, received, group=group, group_peer=1 - group.rank()
        )
        for pending in dist.batch_isend_irecv([operation]):
            pending.wait()
    future = dist.all_reduce(output, group=group, async_op=True).get_future().wait()
    y = output + 1
    assert future[0] is not None
    assert simnpu.counters() == before
    assert not simnpu.races(), simnpu.races()
    del y


def a_received_tensor_is_undefined_before_wait(group: Group, device: torch.device) -> None:
    if group.rank() > 1:
        return
    x = torch.ones(64, device=device)
    torch.npu.synchronize()
    simnpu.reset()
    if group.rank() == 0:
        dist.isend(torch.zeros(64, device=device), group=group, group_dst=1).wait()
        return
    work = dist.irecv(x, group=group, group_src=0)
    y = x + 0
    assert [race.kind for race in simnpu.races()] == ["read before write ended"], simnpu.races()
    assert y.cpu().abs().min() > 1000
    work.wait()
    assert x.sum().item() == 0


def a_barrier_blocks_the_host(group: Group, device: torch.device) -> None:
    simnpu.reset()
    group.barrier(opts=_barrier_on(device)).wait()
    assert simnpu.counters().host_syncs == 1


def _barrier_on(device: torch.device) -> Any:
    options = dist.distributed_c10d.BarrierOptions()
    options.device = device
    return options


def what_hccl_lacks_is_refused(group: Group, device: torch.device) -> None:
    x = torch.ones(4, dtype=torch.int32, device=device)
    refused(lambda: dist.all_reduce(x, op=ReduceOp.BAND, group=group), "HCCL has SUM, AVG, PRODUCT, MIN and MAX")
    refused(lambda: dist.all_gather_into_tensor(torch.empty(3, device=device), x.float(), group=group), "must have")
    refused(lambda: dist.reduce_scatter_tensor(torch.empty(3, device=device), x.float(), group=group), "must have")
    elsewhere = torch.ones(4, device=torch.device("npu", (device.index + 1) % 4))
    refused(lambda: dist.all_reduce_coalesced([x.float(), elsewhere], group=group), "on one device")
    refused(lambda: dist.recv(x, group=group), "does not support recv")
    dist.all_reduce(x, group=group)  # and nobody hangs afterwards


NPU_ONLY: dict[str, Callable[[Group, torch.device], None]] = {
    "int16 is summed and integers are averaged": int16_sum_and_integer_average,
    "parts that are not contiguous": parts_that_are_not_contiguous,
    **hccl_sizes.CASES,
    "objects": objects,
    "a use without wait is found": no_wait_is_found,
    "overwriting an input without wait is found": overwriting_an_input_is_found,
    "waiting on another stream is not enough": waiting_on_another_stream_is_not_enough,
    "waiting orders and costs no host synchronisation": waiting_orders_and_costs_no_host_sync,
    "a received tensor is undefined before wait": a_received_tensor_is_undefined_before_wait,
    "a barrier blocks the host": a_barrier_blocks_the_host,
    "what HCCL lacks is refused": what_hccl_lacks_is_refused,
}


def _flat(result: Any) -> list[Tensor]:
    tensors = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    return [tensor.cpu() for tensor in tensors]


def _compare(case: Case, group: Group, npu: torch.device) -> None:
    expected = _flat(case(group, torch.device("cpu")))
    simnpu.reset()
    got = _flat(case(group, npu))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype, (one.dtype, other.dtype)
        assert torch.equal(one, other), (one, other)
    assert not simnpu.races(), simnpu.races()


def _outcome(run: Callable[[], None]) -> str:
    try:
        run()
    except Exception:
        return traceback.format_exc()
    finally:
        torch.npu.synchronize()  # what a case has left unordered on purpose is over
    return ""


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    simnpu.load(devices=4, policy="permissive")  # this is about the backend, not about which operators there are
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    timeout = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,npu:hccl", timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    outcomes = {}
    pairs = [dist.new_group([0, 1], timeout=timeout), dist.new_group([2, 3], timeout=timeout)]
    for group in (world, pairs[rank // 2]):
        for name, case in EQUAL_TO_GLOO.items():
            outcomes[f"{group.size()} ranks, {name}"] = _outcome(partial(_compare, case, group, device))
        for name, check in NPU_ONLY.items():
            outcomes[f"{group.size()} ranks, {name}"] = _outcome(partial(check, group, device))
    dist.barrier()
    dist.destroy_process_group()

    # Every tensor on npu, as `init_process_group("hccl")` alone allows: objects travel as npu tensors, too.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("hccl", store=dist.PrefixStore("alone", store), rank=rank, world_size=4, timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    outcomes["hccl alone, objects"] = _outcome(partial(objects, world, device))
    mesh = _outcome(lambda: _mesh_of_two_dimensions(device))
    outcomes["hccl alone, a mesh of two dimensions"] = mesh
    dist.destroy_process_group()
    Path(f"outcomes-{rank}.json").write_text(json.dumps(outcomes))


def _mesh_of_two_dimensions(device: torch.device) -> None:
    mesh = dist.init_device_mesh("npu", (2, 2), mesh_dim_names=("replicate", "shard"))
    x = torch.full((2,), float(dist.get_rank()), device=device)
    dist.all_reduce(x, group=mesh["replicate"].get_group())
    assert x.tolist() == [float(2 * (dist.get_rank() % 2) + 2)] * 2, x


if __name__ == "__main__":
    main()
