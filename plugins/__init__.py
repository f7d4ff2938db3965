"""Targets: the compilers and executors of each, and the code that several share."""
