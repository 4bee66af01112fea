"""One thread for torch: the tensors of the tests are too small to gain from more, and ranks share the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
