"""The cpu target: an interpreter of lowered programs and its kernels, in a C++ extension module that needs no torch."""
