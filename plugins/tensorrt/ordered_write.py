"""A cache write that TensorRT doesn't recognize as one: its outputs only order it before attention.

The outputs of ``kv_write`` are declared as aliases of its inputs; TensorRT "may insert copies" for them. Here the same
machine code writes to its inputs. Its outputs are two numbers that are never written or read. Attention has them as
inputs, so that it runs after the write.
"""

from __future__ import annotations

import re
from dataclasses import replace

from enginewright.runtime.shared.errors import TargetError

from ..gpu.compile_ahead import CompiledKernel


def writing_to_inputs(kernel: CompiledKernel) -> CompiledKernel:
    """Returns a write kernel whose code takes the caches' addresses from its parameters ``X_before`` instead of X.

    Raises TargetError if the code doesn't load each of these addresses by name.
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
