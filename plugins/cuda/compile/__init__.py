"""The cuda target: a lowered program with 16-bit activations and weights in rows, and its kernels."""
