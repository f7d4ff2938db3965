"""What the target "toy" needs of a machine, for `optimize doctor`: what the cpu target needs."""

from enginewright.plugins.cpu.serve.doctor import check

__all__ = ["check"]
