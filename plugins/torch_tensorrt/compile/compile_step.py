"""Compiles an exported step with Torch-TensorRT.

This hasn't run with Torch-TensorRT yet, which needs PyTorch with CUDA and a GPU. It is written for version 2.14, whose
signatures are in typings/torch_tensorrt. A test runs it with a fake of the library.
"""

from __future__ import annotations

from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import torch_tensorrt
from torch.export.passes import move_to_device_pass

from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import VerificationError

from .exported_step import LEAST, MOST, ExportedStep, exported_step, step_example

DEVICE = "cuda"

_USUAL = 64
"""The value of each size for which engines are optimized."""

_LENGTHS = (3, 7, 11)
"""The tokens of the requests with which results are compared."""

_RELATIVE = 1e-3
"""The largest allowed difference, as a share of the largest logit. Engines add 32-bit floats in an order of their own,
without TF32.
"""


def compile_step(program: Program, path: Path) -> ExportedStep:
    """Compiles a program, writes it as an ExportedProgram, and compares the file's results with the program's.

    The comparison has another number of tokens than the example, so that it detects a file of one fixed size. Returns
    the exported step. Raises VerificationError if the results differ.
    """
    step = exported_step(program)
    inputs = [
        torch_tensorrt.Input(min_shape=least, opt_shape=usual, max_shape=most, dtype=example.dtype)
        for example, least, usual, most in zip(
            step.example, step.shapes(LEAST), step.shapes(_USUAL), step.shapes(MOST), strict=True
        )
    ]
    compiled = torch_tensorrt.dynamo.compile(
        move_to_device_pass(step.exported, DEVICE),
        arg_inputs=inputs,
        device=torch.device(DEVICE),
        disable_tf32=True,
        torch_executed_ops=set(step.kept()),
    )
    torch_tensorrt.save(  # which traces it anew
        compiled,
        str(path),
        output_format="exported_program",
        arg_inputs=[g.to(DEVICE) for g in step.example],
        dynamic_shapes=_dynamic_shapes(compiled, step),
    )
    _compare(torch.export.load(str(path)).module(), program, step)
    return step


def _dynamic_shapes(compiled: torch.nn.Module, step: ExportedStep) -> dict[str, Any]:
    """Returns the dynamic sizes of each argument of a compiled module, by its name; a tuple for an argument such as
    *inputs.
    """
    arguments = signature(compiled.forward).parameters
    if any(argument.kind is Parameter.VAR_POSITIONAL for argument in arguments.values()):
        return dict.fromkeys(arguments, step.dynamic)
    return dict(zip(arguments, step.dynamic, strict=True))


def _compare(compiled: torch.nn.Module, program: Program, step: ExportedStep) -> None:
    inputs = step_example(program, _LENGTHS)
    expected = program.evaluate(dict(zip(step.inputs, inputs, strict=True)))[0]
    try:
        with torch.no_grad():
            logits = compiled(*(g.to(DEVICE) for g in inputs))[0].cpu()
    except (RuntimeError, AssertionError) as e:
        raise VerificationError(
            f"target torch-tensorrt: what torch_tensorrt {torch_tensorrt.__version__} saved doesn't take a step of "
            f"{sum(_LENGTHS)} tokens: {str(e).strip().partition(chr(10))[0]}",
            hint="Leave the target out, and please report it.",
        ) from e
    largest, off = float(expected.abs().max()), float((logits - expected).abs().max())
    if not off <= _RELATIVE * largest:
        raise VerificationError(
            f"target torch-tensorrt: what torch_tensorrt {torch_tensorrt.__version__} compiled gives other logits than "
            f"the program: off by {off:.3g}, and they reach {largest:.3g}",
            hint="Leave the target out, and please report it.",
        )
