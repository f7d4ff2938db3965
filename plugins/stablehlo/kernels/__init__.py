"""Handlers for custom calls of XLA: the cpu target's kernels as a library that jaxlib's PJRT calls."""
