"""Named model sizes, as the TurboGR paper uses them (its Table 1 and appendix).

The item dimension is also the model dimension; heads are 8 throughout; "long" is large with twice the sequence.
Dense parameters of an HSTU of these sizes are 5 * D^2 * L apart from norms, biases and the position embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SizeName = Literal["tiny", "small", "medium", "large", "long"]


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a model: D, blocks, heads, query/key and value dim of a head, longest sequence."""

    dim: int
    blocks: int
    heads: int
    qk_dim: int
    value_dim: int
    max_length: int


SIZES: dict[SizeName, ModelSize] = {
    "tiny": ModelSize(dim=128, blocks=2, heads=8, qk_dim=16, value_dim=16, max_length=2048),
    "small": ModelSize(dim=256, blocks=4, heads=8, qk_dim=32, value_dim=32, max_length=2048),
    "medium": ModelSize(dim=512, blocks=8, heads=8, qk_dim=64, value_dim=64, max_length=2048),
    "large": ModelSize(dim=1024, blocks=16, heads=8, qk_dim=128, value_dim=128, max_length=2048),
    "long": ModelSize(dim=1024, blocks=16, heads=8, qk_dim=128, value_dim=128, max_length=4096),
}
