"""The compiler of the cuda target: a lowered program with 16-bit activations, and its kernels."""
