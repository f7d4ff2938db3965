"""Lowering makes of a Program the lowered program that targets start from."""
