"""The torch-tensorrt target: a program that Torch-TensorRT compiles, to be run by PyTorch with CUDA."""
