"""The compiler's half of the target "toy": the program and weights of the cpu target, under another name."""

from __future__ import annotations

from enginewright.plugins.cpu.compile.emitter import CpuEmitter
from enginewright.plugins.emit.target import Target


class ToyEmitter(CpuEmitter):
    """Writes what the cpu target has."""

    name = "toy"


TARGET = Target(ToyEmitter(), tools=("enginewright-toy",), narrow_caches=True)
