"""Exact groups of ranks against plain TorchRec on two emulated hosts."""
