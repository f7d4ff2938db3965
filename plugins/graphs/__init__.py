"""Converts programs to ONNX graphs with KV caches in slots, for the onnx target and the TensorRT targets."""
