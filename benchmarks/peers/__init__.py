"""Enginewright beside other engines: the same weights, the same prompts, interleaved."""
