"""The torch-tensorrt target: the program compiled by Torch-TensorRT, for a PyTorch with CUDA to run."""
