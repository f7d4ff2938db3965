"""Code that the GPU targets share: Triton kernels, the CUDA driver, sampling. Triton is imported only when it
is used.
"""
