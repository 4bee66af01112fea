"""What fbgemm's modules ask about their batches, against fbgemm's CPU kernel."""

from __future__ import annotations

import torch

from turbogr_plugin.kernels.fbgemm_batch_metadata import generate_vbe_metadata, get_infos_metadata


def test_bits_of_a_sample_number_are_those_of_the_cpu() -> None:
    for features in (1, 2, 63, 64, 1000):
        expected = torch.ops.fbgemm.get_infos_metadata(torch.empty(0), 1, features)
        assert get_infos_metadata(torch.empty(0), 1, features) == expected


def test_bags_with_variable_batch_sizes_begin_where_fbgemm_puts_them() -> None:
    by_rank = torch.tensor([[2, 0, 3], [0, 0, 0], [1, 4, 0]])
    widths = torch.tensor([4, 8, 12])
    zero = torch.zeros(1, dtype=torch.int64)
    bag_offsets = torch.cat([zero, by_rank.sum(1).cumsum(0)]).int()
    rank_offsets = torch.cat([zero.expand(3, 1), by_rank.cumsum(1)], 1).int()
    outputs = torch.cat([zero, (by_rank.t() * widths).flatten().cumsum(0)])
    columns = torch.cat([zero, widths.cumsum(0)]).int()
    arguments = (bag_offsets, rank_offsets, outputs, columns, 12, False, 4, 20, 10)
    expected = torch.ops.fbgemm.generate_vbe_metadata(*arguments)
    found = generate_vbe_metadata(*arguments)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    moved = generate_vbe_metadata(*arguments, vbe_output_offsets=outputs[:-1].view(3, 3) + 100)
    assert torch.equal(moved[0], found[0] + 100)
