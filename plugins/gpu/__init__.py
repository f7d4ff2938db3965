"""Code that the GPU targets share: Triton kernels, the CUDA driver, sampling. Importing it doesn't import Triton."""
