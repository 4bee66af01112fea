"""Triton kernels, one source for Ascend (triton-ascend) and CUDA (the Triton that comes with torch).

Importing the package and its modules imports no Triton: the `*_kernels` modules do, when a kernel is first launched.
"""
