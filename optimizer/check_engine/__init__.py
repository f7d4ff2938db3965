"""Checks of engines on the machine that has them: a model's tokens are compared with the cpu target's."""
