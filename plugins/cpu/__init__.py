"""The CPU target: the program interpreter and its kernels, a C++ extension module that needs no torch."""
