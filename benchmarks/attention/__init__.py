"""The fused attention and its dense neighbours against what PyTorch does without them; see `__main__`."""
