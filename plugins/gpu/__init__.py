"""What GPU targets share: Triton kernels, the CUDA driver, sampling. Only what needs Triton imports it, when needed."""
