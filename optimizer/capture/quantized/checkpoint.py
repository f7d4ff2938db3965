"""A folder whose weights are quantized already: each module's packed tensors become one lazy weight.

``LAYOUTS`` has the layouts of tensors; a file beside this one reads each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.shared.errors import SourceError

from .bitsandbytes import read_bitsandbytes
from .config import Layout, QuantizedFolder
from .floats import read_fp8, read_mxfp4, read_mxfp4_blocks, read_nvfp4
from .integers import read_awq, read_gptq, read_int, read_packed
from .packed_module import DOWNLOAD, PackedModule, PackedNumbers, short_name, weight_of

_UNUSED = (
    *(".input_scale", ".input_scale_ub", ".input_global_scale", ".input_zero_point", ".activation_scale"),
    *(".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point"),
    *(".weight_format", "_proj_input_scale"),
)
"""Ends of names of tensors for activations and the KV cache. They aren't used, as recipes say how to store these."""


@dataclass(frozen=True)
class TensorLayout:
    """A layout of packed weights.

    Attributes:
        ends: the end of the name of the tensor with the packed values.
        dtypes: the types that this tensor may have.
        becomes: the end of the name of the model's parameter, in place of ``ends``.
        read: the function that reads the numbers.
    """

    ends: str
    dtypes: tuple[torch.dtype, ...]
    becomes: str
    read: Callable[[PackedModule], PackedNumbers]

    def has(self, tensor: WeightExpr, name: str) -> bool:
        """Returns True if ``tensor`` holds values in this layout. Scales may have its type, so ``name`` decides."""
        return name.endswith(self.ends) and tensor.dtype in self.dtypes and not name.endswith(("_scale", "_scale_inv"))


def unpacked(tensors: Mapping[str, WeightExpr], folder: QuantizedFolder) -> dict[str, WeightExpr]:
    """Returns the tensors of a folder, with a lazy weight in place of the tensors of each packed weight.

    Args:
        tensors: the folder's tensors by their names in the checkpoint, unread.
        folder: the folder's quantization, from its configuration.

    Raises:
        SourceError: naming file and tensor: one is missing, has another type or shape than the configuration says, a
            zero point or an index of a group out of range, scales that aren't finite, or tensors of another method.
    """
    named = {g.scheme.layout for g in folder.groups}
    weights: dict[str, WeightExpr] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        layouts = [LAYOUTS[layout] for layout in sorted(named) if LAYOUTS[layout].has(tensor, name)]
        if not layouts or not isinstance(tensor, Source):
            continue
        base = name.removesuffix(layouts[0].ends)
        module = base.removesuffix(".weight")
        scheme = folder.scheme_of(module)
        layout = LAYOUTS[scheme.layout]
        if not layout.has(tensor, name):
            raise SourceError(
                f"{tensor.origin}: tensor {name} is {short_name(tensor.dtype)}, and {folder.where} says that {module} "
                f"is packed as {scheme.layout}",
                hint=DOWNLOAD,
            )
        packed = PackedModule(module, base, tensor, scheme, folder, tensors)
        target = base + layout.becomes
        if target in tensors and target != name:
            raise SourceError(f"{tensor.origin}: tensors {name} and {target} are both {target}", hint=DOWNLOAD)
        weights[target] = weight_of(layout.read(packed), target, tensor)
        used |= packed.taken | {name}
    left = {name: t for name, t in tensors.items() if name not in used and not name.endswith(_UNUSED)}
    _refuse_others(left, folder, len(weights))
    return left | weights


def without_idle_biases(
    named: Mapping[str, WeightExpr], tensors: Mapping[str, WeightExpr], model: torch.nn.Module, prefix: str
) -> dict[str, WeightExpr]:
    """Returns ``named`` without biases of zeros that the model has no parameter for.

    GPTQ's packers write such a bias for each linear.

    Args:
        named: the tensors by the model's names.
        tensors: the same tensors by their names in the checkpoint.
        model: the model.
        prefix: the name of its base model, which names of tensors may lack.
    """
    beside = {
        id(t) for n, t in tensors.items() if n.endswith(".bias") and f"{n.removesuffix('.bias')}.weight" in tensors
    }
    places = set(model.state_dict())

    def is_idle(name: str, tensor: WeightExpr) -> bool:
        if id(tensor) not in beside or name in places or f"{prefix}.{name}" in places:
            return False
        return tensor.dtype.is_floating_point and not bool(tensor.evaluate().any())

    return {name: tensor for name, tensor in named.items() if not is_idle(name, tensor)}


def _refuse_others(left: Mapping[str, WeightExpr], folder: QuantizedFolder, packed: int) -> None:
    """Raises SourceError if packed tensors weren't used, or if there is no packed weight at all.

    Args:
        left: the tensors that no packed weight has used.
        folder: the folder's quantization.
        packed: the number of packed weights.
    """
    for name, tensor in left.items():
        if any(layout.has(tensor, name) for layout in LAYOUTS.values()):
            origin = tensor.origin if isinstance(tensor, Source) else ""
            raise SourceError(
                f"{origin}: tensor {name} is {short_name(tensor.dtype)}, as {folder.method} has none; {folder.where} "
                "says nothing else",
                hint="The checkpoint mixes two methods: download it again, or take another one.",
            )
    if not packed:
        raise SourceError(
            f"{folder.where} says that the weights are quantized ({folder.method}), and none is", hint=DOWNLOAD
        )


_read_nvfp4_of_modelopt = partial(read_nvfp4, second=".weight_scale_2", inverse=False)

LAYOUTS: Mapping[Layout, TensorLayout] = {
    "gptq": TensorLayout(".qweight", (torch.int32,), ".weight", read_gptq),
    "awq": TensorLayout(".qweight", (torch.int32,), ".weight", read_awq),
    "packed": TensorLayout(".weight_packed", (torch.int32,), ".weight", read_packed),
    "int": TensorLayout(".weight", (torch.int8,), ".weight", read_int),
    "fp8": TensorLayout("", (torch.float8_e4m3fn,), "", read_fp8),
    "nvfp4": TensorLayout(".weight_packed", (torch.uint8,), ".weight", read_nvfp4),
    "nvfp4-modelopt": TensorLayout(".weight", (torch.uint8,), ".weight", _read_nvfp4_of_modelopt),
    "mxfp4": TensorLayout(".weight_packed", (torch.uint8,), ".weight", read_mxfp4),
    "mxfp4-modelopt": TensorLayout(".weight", (torch.uint8,), ".weight", read_mxfp4),
    "mxfp8": TensorLayout("", (torch.float8_e4m3fn,), "", read_fp8),
    "mxfp4-blocks": TensorLayout("_blocks", (torch.uint8,), "", read_mxfp4_blocks),
    "bnb": TensorLayout(".weight", (torch.uint8, torch.int8), ".weight", read_bitsandbytes),
}
"""Layout of a module's tensors -> its reader.

To add a layout, add an entry here, and one to the table in config.py for the method that has it.
"""
