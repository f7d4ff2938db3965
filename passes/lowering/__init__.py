"""From a Program to the lowered program that targets start from."""
