"""The compiler of the tensorrt target: a network's description, its plugins' kernels, and engines built from both."""
