"""Checks what the target "toy" needs of a machine, for `optimize doctor`: the needs of the cpu target."""

from enginewright.plugins.cpu.serve.doctor import check

__all__ = ["check"]
