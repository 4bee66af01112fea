"""What torch is told of the attention operators: schemas, shapes without data, autograd, compiled graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tests.kernels.attention_cases import Case, inputs, with_gradients
from turbogr_plugin.kernels.attention_call import FuxiAttentionCall, HSTUAttentionCall

CASES = [
    Case((3, 0, 5), per_head=True),
    Case((0,), time=0, causal=False),
    Case((6, 2), targets=(2, 1), contextual=(1, 0), window=2, borders=True),
    Case((3, 4), family="fuxi"),
    Case((3, 4), family="fuxi", decay=True, per_head=True, targets=(1, 1)),
]
RECORDS = {"hstu": HSTUAttentionCall, "fuxi": FuxiAttentionCall}


def _operators(case: Case) -> tuple[Any, Any]:
    name = f"{case.family}_attention"
    return getattr(torch.ops.turbogr, name).default, getattr(torch.ops.turbogr, f"{name}_backward").default


def _arguments(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    x = inputs(case, dtype)
    keywords = x.keywords()
    keywords["time_borders"] = keywords.pop("time_buckets")
    if isinstance(keywords["num_contextual"], int):
        keywords["num_contextual"] = None
    return tuple(RECORDS[case.family](x.q, x.k, x.v, x.offsets, **keywords))


def test_schemas_have_the_fields_of_the_records_in_their_order() -> None:
    for family, record in RECORDS.items():
        forward, backward = _operators(Case((), family=family))  # type: ignore[arg-type]
        assert [a.name for a in forward._schema.arguments] == [*record._fields, "implementation"]
        assert [a.name for a in backward._schema.arguments] == ["grad", *record._fields, "implementation"]
        for argument in forward._schema.arguments[:-1]:
            if argument.has_default_value():
                assert argument.default_value == record._field_defaults[argument.name]
            else:
                assert argument.name not in record._field_defaults


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_operators_pass_opcheck(case: Case) -> None:
    forward, backward = _operators(case)
    arguments = _arguments(case)
    torch.library.opcheck(forward, arguments)
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    grad = torch.ones_like(forward(*detached))
    torch.library.opcheck(backward, (grad, *detached))
    frozen = RECORDS[case.family](*detached)._replace(time_gradient=False, position_gradient=False)
    torch.library.opcheck(backward, (grad, *frozen), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize(("case", "layout_on_host"), [(CASES[2], True), (CASES[4], False)], ids=str)
def test_a_compiled_full_graph_gives_the_same_bits_for_batches_of_any_size(
    case: Case, layout_on_host: bool, backend: str
) -> None:
    def step(leaves: dict[str, Tensor], x: Any, host_offsets: list[int] | None) -> Tensor:
        return replace(x, **leaves).call(host_offsets=host_offsets) * 2

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for lengths in (case.lengths, tuple(length + 2 for length in case.lengths)):
        x = inputs(replace(case, lengths=lengths), torch.float32)
        host_offsets = x.offsets.tolist() if layout_on_host else None
        expected = with_gradients(x, step(x.leaves(), x, host_offsets))
        found = with_gradients(x, compiled(x.leaves(), x, host_offsets))
        for name, want in expected.items():
            assert torch.equal(found[name], want), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_are_known_without_data(case: Case) -> None:
    x = inputs(case, torch.bfloat16)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) for name, value in vars(x).items() if isinstance(value, Tensor)}
        fake = replace(x, **fakes)
        keywords = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) and value.device.type == "cpu" else value
            for name, value in x.keywords().items()
            if name not in x.leaves() and not name.endswith("timestamps")
        }
        output = fake.call(**keywords)
        gradients = torch.autograd.grad(output.sum(), list(fake.leaves().values()))
    expected = x.call()
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    for leaf, gradient in zip(x.leaves().values(), gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("family", ["hstu", "fuxi"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": torch.tensor([0, 9, 7])}, r"offsets\[1\] = 9 > 7"),
        ({"offsets": torch.tensor([0, 3, 8])}, "number of values 7, got 0 to 8"),
        ({"offsets": torch.tensor([-1, 3, 7])}, "got -1 to 7"),
        ({"host_offsets": [0, 9, 7]}, r"offsets\[1\] = 9 > 7"),
        ({"num_targets": torch.tensor([4, 0])}, r"num_targets\[0\].*got 4"),
        ({"time_borders": torch.tensor([2.0, 1.0, *[3.0] * 6])}, "ascending"),
        ({"time_borders": torch.ones(9)}, "9 - 1 borders"),
    ],
    ids=str,
)
def test_no_operator_reads_past_the_end_when_called_directly(
    family: Any, changes: dict[str, Any], message: str
) -> None:
    case = Case((3, 4), family=family)
    forward, backward = _operators(case)
    call = RECORDS[family](*_arguments(case))._replace(**changes)
    with pytest.raises(ValueError, match=message):
        forward(*call)
    grad = torch.ones(7, 2, 8 * (3 if family == "fuxi" else 1))
    with pytest.raises(ValueError, match=message):
        backward(grad, *call)
    if "offsets" in changes:
        with pytest.raises(ValueError, match="grad must be like the output"):
            backward(grad[:, :, 1:], *_arguments(case))


def test_queries_stand_at_their_own_event_when_called_directly_without_their_times() -> None:
    arguments = HSTUAttentionCall(*_arguments(CASES[0]))
    assert arguments.query_timestamps is None
    named = arguments._replace(query_timestamps=arguments.timestamps)
    forward, _ = _operators(CASES[0])
    assert torch.equal(forward(*arguments), forward(*named))


def test_second_derivatives_are_refused() -> None:
    x = inputs(CASES[0])
    (dq,) = torch.autograd.grad(x.call().square().sum(), x.q, create_graph=True)
    with pytest.raises(RuntimeError, match="hstu_attention_backward"):
        dq.sum().backward()


@pytest.mark.parametrize("leaf", ["q", "time_bias"])
def test_forward_mode_derivatives_are_refused(leaf: str) -> None:
    x = inputs(CASES[0])
    with forward_ad.dual_level():
        plain = {name: value.detach() for name, value in x.leaves().items()}
        plain[leaf] = forward_ad.make_dual(plain[leaf], torch.ones_like(plain[leaf]))
        with pytest.raises(RuntimeError, match=r"hstu_attention.*forward-mode"):
            replace(x, **plain).call()
