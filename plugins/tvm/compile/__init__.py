"""The tvm target: each step of a lowered program as a kernel in TVM's loops, compiled ahead."""
