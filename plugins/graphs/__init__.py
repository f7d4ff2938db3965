"""ONNX graphs of programs, in the linear form of a step: what the onnx target writes, and others build on."""
