"""The C++ core under the targets: the interpreter of lowered programs, the sampler, and their Python interface."""
