"""The compiler of the tensorrt-rtx target: it builds engines from ONNX graphs, on a machine without a GPU."""
