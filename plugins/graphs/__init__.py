"""ONNX graphs of programs, with KV caches in slots: files of the onnx target, and input of the TensorRT targets."""
