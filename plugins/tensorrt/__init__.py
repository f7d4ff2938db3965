"""The tensorrt target: paged attention as plugins of TensorRT, with Triton kernels compiled ahead."""
