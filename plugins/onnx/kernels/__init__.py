"""Our operators for onnxruntime: the cpu target's kernels as a library that sessions load."""
