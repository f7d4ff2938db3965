"""The cpu target's kernels as a library of handlers for XLA's custom calls, which jaxlib's PJRT runs."""
