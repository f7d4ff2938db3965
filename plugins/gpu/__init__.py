"""The shared parts of GPU targets: Triton kernels, the CUDA driver, sampling. Triton is imported only where it is
needed."""
