from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.padded_hstu import padded_hstu
from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.keyed_dropout import DropoutKey, keep_mask
from turbogr_plugin.kernels.offsets import lengths_to_offsets, positions, row_ids
from turbogr_plugin.kernels.relative_bias import query_times
from turbogr_plugin.models.hstu import HSTU, HSTUConfig, JaggedSequence
from turbogr_plugin.models.sizes import SIZES, ModelSize, SizeName

SMALL: dict[str, Any] = {"dim": 12, "blocks": 2, "heads": 3, "qk_dim": 4, "value_dim": 5, "max_length": 9}
P = {"input_dropout": 0.3, "dropout": 0.4}


def _model(**changes: Any) -> tuple[HSTUConfig, HSTU]:
    config = HSTUConfig(**{**SMALL, "time_buckets": 16, **changes})
    torch.manual_seed(0)
    model = HSTU(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # no parameter at a value (0 or 1) that hides a wrong use of it
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    return config, model


@pytest.mark.parametrize("lengths", [[4, 9, 1], [0, 3, 0, 0, 6], [1]], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_time": "next"},
        {"time_buckets": 0},
        {"position_bias": False},
        {"recompute": "projection"},
        {"heads": 1, "blocks": 1, "qk_dim": 1},
        P,
    ],
    ids=str,
)
def test_outputs_and_parameter_gradients_equal_the_padded_model(changes: dict[str, Any], lengths: list[int]) -> None:
    config, model = _model(**changes)
    generator = torch.Generator().manual_seed(1)
    total, width = sum(lengths), max(lengths)
    offsets = lengths_to_offsets(torch.tensor(lengths))
    row, place = row_ids(offsets, total), positions(offsets, total)
    times = torch.randint(0, 10**6, (total,), generator=generator)
    at = query_times(times, offsets, config.query_time)
    key = DropoutKey(3, 7, 100 + row, place) if changes is P else None
    tokens = torch.randn(total, SMALL["dim"], generator=generator, dtype=torch.float64).requires_grad_()

    def pad(values: Tensor) -> Tensor:
        padded = torch.full((len(lengths), width, *values.shape[1:]), 7, dtype=values.dtype)
        return padded.index_put((row, place), values)

    factors = None
    if key is not None:
        inner = config.dimensions().heads * config.dimensions().value_dim
        rates = [(SMALL["dim"], 0.3), (inner, 0.4), (inner, 0.4)]
        flat = [keep_mask(key, layer, width, p).double() / (1 - p) for layer, (width, p) in enumerate(rates)]
        factors = [pad(factor) for factor in flat]
    weights = dict(model.named_parameters())
    expected = padded_hstu(config, weights, pad(tokens), pad(torch.ones(total)) == 1, pad(times), pad(at), factors)[
        row, place
    ]
    found = model(tokens, place, JaggedSequence(offsets, times, at, key))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    leaves = [tokens, *weights.values()]
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for name, got, want in zip(
        ["tokens", *weights],
        torch.autograd.grad(found, leaves, weight),
        torch.autograd.grad(expected, leaves, weight),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("recompute", ["norm", "projection"])
def test_a_model_in_float32_stays_near_the_same_in_float64(recompute: str) -> None:
    # The implementations of the operators are then others: those in C++ where they can be built.
    _, exact = _model(**P, recompute=recompute)
    _, model = _model(**P, recompute=recompute)
    model.float()
    offsets = lengths_to_offsets(torch.tensor([4, 9, 1]))
    row, place = row_ids(offsets, 14), positions(offsets, 14)
    times = torch.arange(14) * 1000
    sequence = JaggedSequence(offsets, times, times, DropoutKey(3, 7, 100 + row, place))
    tokens = torch.randn(14, SMALL["dim"], generator=torch.Generator().manual_seed(1))
    found, expected = model(tokens, place, sequence), exact(tokens.double(), place, sequence)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(found.sum(), list(model.parameters()))
    wanted = torch.autograd.grad(expected.sum(), list(exact.parameters()))
    for got, want in zip(gradients, wanted, strict=True):
        assert float((got - want).norm()) < 1e-4 * float(want.norm() + 1)


def test_no_tokens_give_no_output_and_zero_gradients() -> None:
    _, model = _model(**P)
    empty = torch.empty(0, dtype=torch.int64)
    key = DropoutKey(0, 0, empty, empty)
    sequence = JaggedSequence(torch.zeros(3, dtype=torch.int64), empty, empty, key)
    output = model(torch.empty(0, 12, dtype=torch.float64), empty, sequence)
    assert output.shape == (0, 12)
    output.sum().backward()
    for name, parameter in model.named_parameters():  # DDP waits for a gradient of each
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("size", list(SIZES))
def test_named_sizes_have_the_published_number_of_dense_parameters(size: SizeName) -> None:
    config = HSTUConfig(size=size)
    with torch.device("meta"):
        model = HSTU(config)
    published = 5 * SIZES[size].dim ** 2 * SIZES[size].blocks
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    assert matrices == published
    assert sum(p.numel() for p in model.blocks.parameters()) < 1.04 * published
    assert model.position_embedding.shape == (SIZES[size].max_length, SIZES[size].dim)


def test_fields_given_override_the_named_size() -> None:
    config = HSTUConfig(size="small", heads=2, max_length=50)
    assert config.dimensions() == ModelSize(dim=256, blocks=4, heads=2, qk_dim=32, value_dim=32, max_length=50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "huge"}, "model.size must be one of tiny, small.*'huge'"),
        *(({name: 0}, f"model.{name} must be at least 1, got 0") for name in SMALL),
        ({"dropout": 1.0}, "model.dropout must be in"),
        ({"input_dropout": -0.1}, "model.input_dropout must be in"),
        ({"time_buckets": -1}, "model.time_buckets must be at least 0"),
        ({"query_time": "last"}, "model.query_time.*'last'"),
        ({"recompute": "nothing"}, "model.recompute must be one of .*'nothing'"),
    ],
    ids=str,
)
def test_a_config_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HSTUConfig(**changes)
