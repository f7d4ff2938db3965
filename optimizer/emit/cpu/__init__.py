"""The cpu target: the lowered program, and weights packed for its kernels."""
