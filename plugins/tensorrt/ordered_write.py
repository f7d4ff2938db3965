"""The write into a cache as TensorRT sees nothing of it: the kernel's code, with outputs that only put it in order.

``kv_write`` writes where its outputs are, which are declared to be the memory of its inputs; then TensorRT "may insert
copies". Here the same code writes where its inputs are. Its outputs are two numbers that nobody writes or reads, which
attention takes among its inputs, so that it comes after the write.
"""

from __future__ import annotations

import re
from dataclasses import replace

from enginewright.runtime.shared.errors import TargetError

from ..gpu.compile_ahead import CompiledKernel


def writing_to_inputs(kernel: CompiledKernel) -> CompiledKernel:
    """A write whose code takes the caches' addresses where ``X_before`` stands among its parameters, not from X.

    Raises TargetError for code that doesn't load each of those addresses by name.
    """
    places = {name: index for index, (name, _) in enumerate(kernel.spec.arguments)}
    code = kernel.ptx
    for name in (name for name in places if f"{name}_before" in places):
        input_param, output_param = (f"[{kernel.entry}_param_{places[n]}]" for n in (f"{name}_before", name))
        if output_param not in code or input_param in code:
            raise TargetError(
                f"{kernel.entry}: its code can't be made to write to its inputs: {output_param} is read "
                f"{code.count(output_param)} times, and {input_param} {code.count(input_param)} times",
                hint='Export with caches = "aliased" in [engines].',
            )
        code = re.sub(re.escape(output_param), input_param, code)
    return replace(kernel, ptx=code)
