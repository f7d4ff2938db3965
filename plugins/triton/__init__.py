"""Kernels in Triton: the paged KV cache and attention over it. Only what needs Triton imports it, when it is needed."""
