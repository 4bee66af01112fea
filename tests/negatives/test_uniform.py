from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.offsets import lengths_to_offsets
from turbogr_plugin.negatives.uniform import NegativesConfig, NegativeSharing, uniform_negatives


def _draw(
    samples: list[int],
    targets: list[int],
    *,
    sharing: NegativeSharing,
    count: int = 5,
    num_items: int = 1000,
    seed: int = 4,
    epoch: int = 2,
) -> list[list[int]]:
    """The negatives of each sample of a batch."""
    ids, lengths = uniform_negatives(
        NegativesConfig(count=count, sharing=sharing),
        num_items=num_items,
        seed=seed,
        epoch=epoch,
        samples=torch.tensor(samples, dtype=torch.int64),
        target_offsets=lengths_to_offsets(torch.tensor(targets, dtype=torch.int64)),
    )
    assert ids.dtype == lengths.dtype == torch.int64
    assert int(lengths.sum()) == ids.numel()
    return [part.tolist() for part in ids.split(lengths.tolist())]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_each_target_or_each_sample_with_a_target_gets_its_count(count: int) -> None:
    targets = [3, 0, 1, 2]
    none = _draw([5, 6, 7, 8], targets, sharing="none", count=count)
    assert [len(part) for part in none] == [n * count for n in targets]
    sequence = _draw([5, 6, 7, 8], targets, sharing="sequence", count=count)
    assert [len(part) for part in sequence] == [count, 0, count, count]


@pytest.mark.parametrize("sharing", ["none", "sequence"])
def test_a_sample_draws_the_same_negatives_in_any_batch_and_order(sharing: NegativeSharing) -> None:
    whole = _draw([5, 6, 7, 8], [3, 1, 2, 4], sharing=sharing)
    other = _draw([8, 900, 5], [4, 6, 3], sharing=sharing)
    alone = _draw([6], [1], sharing=sharing)
    assert [other[0], other[2], alone[0]] == [whole[3], whole[0], whole[1]]


def test_a_target_keeps_its_negatives_when_the_sequence_grows() -> None:
    assert _draw([5], [6], sharing="none")[0][:15] == _draw([5], [3], sharing="none")[0]


@pytest.mark.parametrize("sharing", ["none", "sequence"])
def test_seeds_epochs_and_samples_draw_others(sharing: NegativeSharing) -> None:
    drawn = [
        _draw([5], [1], sharing=sharing, count=40),
        _draw([6], [1], sharing=sharing, count=40),
        _draw([5], [1], sharing=sharing, count=40, seed=5),
        _draw([5], [1], sharing=sharing, count=40, epoch=3),
    ]
    assert len({tuple(part) for (part,) in drawn}) == 4


def test_positions_of_a_sequence_draw_apart() -> None:
    (ids,) = _draw([5], [50], sharing="none", count=20, num_items=1 << 40)
    assert len(set(ids)) == 1000


def _chi_square(values: Tensor, bins: int) -> float:
    counts = torch.bincount(values, minlength=bins).double()
    return float(((counts - values.numel() / bins) ** 2).sum() * bins / values.numel())


@pytest.mark.parametrize("num_items", [1, 3, 100, (1 << 24) + 1, 1 << 40])
def test_draws_are_uniform_over_the_whole_corpus(num_items: int) -> None:
    ids = torch.tensor([x for part in _draw(list(range(40)), [10] * 40, sharing="none", count=50, num_items=num_items)
                        for x in part])  # fmt: skip
    assert int(ids.min()) >= 0 and int(ids.max()) < num_items
    bins = min(num_items, 100)
    freedom = bins - 1
    found = _chi_square((ids.double() * bins / num_items).floor().long(), bins)
    assert abs(found - freedom) <= 5 * (2 * freedom) ** 0.5
    if num_items == 1 << 40:
        assert len(ids.unique()) > 19_990  # ids beyond 2^32 keep their low bits


@pytest.mark.parametrize("sharing", ["none", "sequence"])
@pytest.mark.parametrize("targets", [[], [0], [0, 0]], ids=str)
def test_nothing_is_drawn_without_targets(sharing: NegativeSharing, targets: list[int]) -> None:
    assert _draw(list(range(len(targets))), targets, sharing=sharing) in ([[] for _ in targets], [])


@pytest.mark.parametrize(
    ("config", "message"),
    [({"count": 0}, "negatives.count must be at least 1, got 0"), ({"sharing": "batch"}, "negatives.sharing.*'batch'")],
)
def test_a_config_out_of_range_is_refused(config: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NegativesConfig(**config)  # type: ignore[arg-type]
