"""The compiling half of the cpu target."""

from ...emit.target import Target
from .emitter import CpuEmitter, lower_for_cpu

TARGET = Target(
    CpuEmitter(),
    narrow_caches=True,
    every_format=True,
    states=True,
    whole_texts=True,
    adaptive_context=True,
    latent_caches=True,
    lower=lambda program, options: lower_for_cpu(program),
)
