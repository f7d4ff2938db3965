"""The compiler of the tvm target: it writes each step of a lowered program as loops in TVM, and compiles them."""
