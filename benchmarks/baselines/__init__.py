"""Baselines made by other libraries: how they are made, and what was recorded of them."""
