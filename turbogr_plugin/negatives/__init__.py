"""Negative items for the sampled softmax: which ones, and the loss against them."""
