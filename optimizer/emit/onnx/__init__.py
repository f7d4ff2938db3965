"""The onnx target: a program as one ONNX file of standard operators, in the linear form of a step."""
