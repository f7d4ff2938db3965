"""Paged attention as plugins of TensorRT, with the Triton kernels compiled ahead. Imports no TensorRT itself."""
