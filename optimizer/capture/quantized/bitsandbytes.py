"""Checkpoints of bitsandbytes 0.50 (functional.py, QuantState): 4 bits as indices into a table, and 8 bits.

bitsandbytes  weight uint8 [N * K / 2, 1]  indices into quant_map, high nibble first; absmax of each 64, or its
                                           index into nested_quant_map, times nested_absmax, plus an offset.
                                           8 bits: int8 [N, K] * SCB / 127
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch

from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.weight_formats import NF4

from .packed_module import PackedModule, PackedNumbers, Read, halves


def read_bitsandbytes(module: PackedModule) -> PackedNumbers:
    """Reads a weight of 4 or 8 bits. The weight's own tensors decide between the two."""
    weight = module.values
    if weight.dtype == torch.int8:
        module.matrix()
        scb = module.typed(module.part(".SCB"), torch.float32, torch.float16, shape=(weight.shape[0],))
        order = module.optional(".weight_format")
        if order is not None and int(order.evaluate().reshape(-1)[0]) != 0:
            raise module.wrong(order, "isn't 0: the rows of its weight are in the order of a GPU's tiles")
        size = weight.shape[1]
        rows: Read = lambda: (scb.evaluate().float() / 127)[:, None]  # noqa: E731
        return PackedNumbers(weight.shape, "bitsandbytes of 8 bits", weight.evaluate, rows, size, -128, 127)
    kinds = [
        end for end in ("nf4", "fp4") if module.base + f".weight.quant_state.bitsandbytes__{end}" in module.tensors
    ]
    kind = kinds[0] if kinds else "nf4"
    state_tensor = module.part(f".weight.quant_state.bitsandbytes__{kind}")
    state = _state(module, state_tensor)
    shape, block = state.shape, state.blocksize
    count = shape[0] * shape[1]
    if weight.shape not in ((-(-count // 2), 1), (1, -(-count // 2))):
        raise module.wrong(weight, f"has shape {weight.shape}, and its state says that the weight is {shape}")
    numbers = module.typed(module.part(".weight.quant_map"), torch.float32, shape=(16,))
    table = numbers.evaluate()
    absmax = module.part(".weight.absmax")
    blocks = -(-count // block)
    module.typed(absmax, torch.float32, torch.uint8, shape=(blocks,))
    largest: Read
    if absmax.dtype == torch.float32:
        largest = absmax.evaluate
    else:
        largest = _nested(module, state, absmax)
    label = f"bitsandbytes {kind}, blocks of {block}"

    def codes() -> torch.Tensor:
        return halves(weight.evaluate().reshape(-1), high_first=True)[:count]

    if shape[1] % block == 0:
        ours = torch.equal(table, torch.tensor(NF4))
        return PackedNumbers(
            shape,
            label,
            lambda: codes().reshape(shape),
            lambda: largest().reshape(shape[0], -1),
            block,
            kind="nf4" if ours else "float",
            table=table,
        )

    def flat() -> torch.Tensor:  # blocks cross rows: each value has the scale of its own block
        return (table[codes().int()] * largest().repeat_interleave(block)[:count]).reshape(shape)

    return PackedNumbers(shape, label, flat, lambda: torch.ones(shape[0], 1), shape[1], kind="float")


@dataclass(frozen=True)
class _State:
    """The JSON state that bitsandbytes stores for a 4-bit weight, next to its tensors.

    Attributes:
        shape: the shape of the weight.
        blocksize: the number of values with a common scale.
        nested_blocksize: the number of scales with a common scale, if scales are quantized too.
        nested_offset: the number that is added to these scales.
    """

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int
    nested_offset: float


def _state(module: PackedModule, tensor: Source) -> _State:
    """Parses the quantization state from a tensor with JSON's bytes. Raises SourceError naming the tensor if that
    fails.
    """
    try:
        text = bytes(module.typed(tensor, torch.uint8).evaluate().reshape(-1).tolist())
        raw = json.loads(text)
        shape = tuple(int(n) for n in raw["shape"])
        state = _State(
            (shape[0], shape[1]),
            int(raw["blocksize"]),
            int(raw.get("nested_blocksize", 0)),
            float(raw.get("nested_offset", 0.0)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise module.wrong(tensor, f"can't be read as the state of a weight: {e}") from e
    if len(shape) != 2 or min(*shape, state.blocksize) < 1 or not math.isfinite(state.nested_offset):
        raise module.wrong(tensor, f"says shape {shape}, blocksize {state.blocksize}")
    return state


def _nested(module: PackedModule, state: _State, absmax: Source) -> Read:
    """Returns a function that reads each block's largest magnitude: an entry of a table, times a factor, plus an
    offset.

    Args:
        module: the packed weight.
        state: the sizes and the offset.
        absmax: the tensor with the indices into the table.
    """
    table = module.typed(module.part(".weight.nested_quant_map"), torch.float32, shape=(256,))
    factors = module.typed(module.part(".weight.nested_absmax"), torch.float32)
    size = state.nested_blocksize
    if size < 1 or factors.shape != (-(-absmax.shape[0] // size),):
        raise module.wrong(factors, f"has shape {factors.shape}, for {absmax.shape[0]} values in blocks of {size}")

    def read() -> torch.Tensor:
        places = absmax.evaluate()
        spread = factors.evaluate().repeat_interleave(size)[: len(places)]
        return table.evaluate()[places.int()] * spread + state.nested_offset

    return read
