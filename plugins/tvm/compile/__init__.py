"""The tvm target: an export writes each step of a lowered program as loops in TVM, and compiles them."""
