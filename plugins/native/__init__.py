"""The C++ core that several targets share: the interpreter of lowered programs, the sampler, and Python wrappers."""
