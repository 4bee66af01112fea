"""Trainer, evaluation and checkpoints: the floor that puts models, data, negatives and sharding together."""
