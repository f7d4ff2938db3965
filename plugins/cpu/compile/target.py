"""The compiler's half of the cpu target."""

from ...emit.target import Target
from .emitter import CpuEmitter

TARGET = Target(CpuEmitter(), narrow_caches=True)
