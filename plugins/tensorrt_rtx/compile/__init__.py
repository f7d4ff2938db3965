"""Engines of TensorRT-RTX, serialized on a machine without a GPU from the ONNX graph of the program."""
