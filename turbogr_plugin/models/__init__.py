"""Generative recommenders on TorchRec embeddings."""
