"""Weights of a Hugging Face folder that are quantized already: each module's packed tensors become one lazy weight.

What a format of ours holds exactly keeps its integers (``SourceCodes``); all else is floats once it is evaluated. That
is decided when a folder is opened, by scales and zero points alone, a few percent of the file; the packed values are
read when a weight is evaluated. A weight is ``(value - zero) * scale``, in groups along its inputs K:

    GPTQ          qweight  int32 [K * bits / 32, N]   code k at bit k * bits of a column: those of 3 bits cross words
                  qzeros   int32 [groups, N * bits / 32], in version 1 less 1; scales f16 [groups, N]; g_idx int32 [K]
    AWQ (gemm)    qweight  int32 [K, N / 8]           nibbles of a word are columns 0, 2, 4, 6, 1, 3, 5, 7 of eight
                  qzeros   int32 [groups, N / 8], the same; scales f16 [groups, N]
    pack-         weight_packed int32 [N, words]      value + 2^(bits - 1), dense; older files pad words of odd widths
     quantized    weight_scale [N, groups]; weight_zero_point packed along N; weight_shape; weight_g_idx [K]
    int-, float-  weight int8 or e4m3 [N, K]; weight_scale of the weight, a channel, a group or a block
    FP8           weight e4m3 [N, K]; weight_scale_inv f32 [N / 128, K / 128], edges rounded up, is multiplied
    NVFP4         weight_packed uint8 [N, K / 2]      e2m1, low nibble first; weight_scale e4m3 [N, K / 16], divided by
                  weight_global_scale. ModelOpt: weight, weight_scale, multiplied by weight_scale_2
    MXFP4         weight_packed uint8 [N, K / 2]; weight_scale uint8 or F8_E8M0 [N, K / 32], 2^(scale - 127).
                  gpt-oss: _blocks uint8 [E, N, K / 32, 16], _scales uint8 [E, N, K / 32] of a parameter [E, K, N]
    MXFP8         weight e4m3 [N, K]; weight_scale as MXFP4 has it
    bitsandbytes  weight uint8 [N * K / 2, 1]         places in quant_map, high nibble first; absmax of each 64, or its
                  place in nested_quant_map, times nested_absmax, plus an offset. 8 bits: int8 [N, K] * SCB / 127

Sources: GPTQModel (utils/model_dequant.py), AutoAWQ (packing_utils.py), compressed-tensors 0.20 (compressors/),
DeepSeek-V3 (README_WEIGHTS.md), gpt-oss (torch/weights.py), bitsandbytes 0.50 (functional.py, QuantState).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from enginewright.passes.ir.prequantized import CodeFormat, Codes, SourceCodes
from enginewright.passes.ir.stacked_weights import SwapAxes
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.shared.weight_formats import FORMATS, FP4, NF4, TWICE_E2M1, Storage

from .quantization_config import Layout, QuantizedFolder, Scheme

Read = Callable[[], torch.Tensor]

_CHUNK_ELEMENTS = 1 << 22
"""Dequantized at a time, so that what is made on the way is small beside the result."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_UNUSED = (
    *(".input_scale", ".input_scale_ub", ".input_global_scale", ".input_zero_point", ".activation_scale"),
    *(".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point"),
    *(".weight_format", "_proj_input_scale"),
)
"""Ends of tensors about activations and the KV cache, which recipes say how to store."""

_DOWNLOAD = "The checkpoint and its configuration don't belong together: download both again."


@dataclass(frozen=True)
class _Numbers:
    """A weight [.., N, K] as its checkpoint has it, before it is decided how it is kept.

    Attributes:
        shape: of the weight.
        label: how it is stored, for people.
        values: reads integers [.., N, K], the codes of a table, or float8_e4m3fn.
        lowest: the least and the largest that integers may be.
        largest: see there.
        scales: float32 [.., N, groups].
        group: how many neighbours along K have a scale.
        zeros: what is subtracted from values, int32 in the shape of scales; None: nothing.
        order: the group of each column, [K], where they aren't neighbours.
        kind: what values are: "int", "fp8", codes of "nf4", or "float" for what no format of ours has.
        table: what codes stand for.
        swapped: the model's parameter has the last two axes exchanged.
    """

    shape: tuple[int, ...]
    label: str
    values: Read
    scales: Read
    group: int
    lowest: int = 0
    largest: int = 0
    zeros: Read | None = None
    order: Read | None = None
    kind: Literal["int", "fp8", "nf4", "float"] = "int"
    table: torch.Tensor | None = None
    swapped: bool = False


@dataclass(frozen=True)
class _Module:
    """One packed weight: ``name`` of its module, ``values`` the tensor that it was found by, and its neighbours."""

    name: str
    base: str
    values: Source
    scheme: Scheme
    folder: QuantizedFolder
    tensors: Mapping[str, WeightExpr]
    taken: set[str] = field(default_factory=set)

    def optional(self, *ends: str) -> Source | None:
        """The tensor of the module with one of these ends."""
        for end in ends:
            if isinstance(tensor := self.tensors.get(self.base + end), Source):
                self.taken.add(self.base + end)
                return tensor
        return None

    def part(self, *ends: str) -> Source:
        """Finds a tensor as ``optional`` does; it must exist. Raises SourceError, naming it, otherwise."""
        tensor = self.optional(*ends)
        if tensor is None:
            raise SourceError(
                f"{self.values.origin}: tensor {self.base + ends[0]} is missing ({self.values.name} is packed)",
                hint="The checkpoint is incomplete, or its configuration is of another one.",
            )
        return tensor

    def wrong(self, tensor: Source, text: str) -> SourceError:
        """An error that names the tensor and its file."""
        return SourceError(f"{tensor.origin}: tensor {tensor.name} {text}", hint=_DOWNLOAD)

    def typed(self, tensor: Source, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None) -> Source:
        """The tensor, if it has one of the types, and the shape. Raises SourceError naming it."""
        if tensor.dtype not in dtypes:
            raise self.wrong(tensor, f"is {_short(tensor.dtype)}, not {' or '.join(map(_short, dtypes))}")
        if shape is not None and tensor.shape != shape:
            raise self.wrong(tensor, f"has shape {tensor.shape}, not {shape}")
        return tensor


@dataclass(frozen=True)
class _Layout:
    """A layout of packed weights: the suffix and types of the tensor with the values, the suffix of the parameter that
    it becomes, and the function that reads it.
    """

    ends: str
    dtypes: tuple[torch.dtype, ...]
    becomes: str
    read: Callable[[_Module], _Numbers]

    def has(self, tensor: WeightExpr, name: str) -> bool:
        """Returns True if a tensor holds this layout's values; scales may have the same type, so names decide."""
        return name.endswith(self.ends) and tensor.dtype in self.dtypes and not name.endswith(("_scale", "_scale_inv"))


def unpacked(tensors: Mapping[str, WeightExpr], folder: QuantizedFolder) -> dict[str, WeightExpr]:
    """The tensors of a folder with every packed weight in place of the tensors that it is made of.

    Args:
        tensors: by their names in the checkpoint, unread.
        folder: how its configuration says that they are packed.

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
                f"{tensor.origin}: tensor {name} is {_short(tensor.dtype)}, and {folder.where} says that {module} is "
                f"packed as {scheme.layout}",
                hint=_DOWNLOAD,
            )
        packed = _Module(module, base, tensor, scheme, folder, tensors)
        target = base + layout.becomes
        if target in tensors and target != name:
            raise SourceError(f"{tensor.origin}: tensors {name} and {target} are both {target}", hint=_DOWNLOAD)
        weights[target] = _expression(layout.read(packed), target, tensor)
        used |= packed.taken | {name}
    left = {name: t for name, t in tensors.items() if name not in used and not name.endswith(_UNUSED)}
    _refuse_others(left, folder, len(weights))
    return left | weights


def without_idle_biases(
    named: Mapping[str, WeightExpr], tensors: Mapping[str, WeightExpr], model: torch.nn.Module, prefix: str
) -> dict[str, WeightExpr]:
    """``named`` without biases of zeros that the model has no place for: GPTQ's packers write one beside each linear.

    Args:
        named: by the model's names.
        tensors: the same by their names in the checkpoint.
        model: what is built of them.
        prefix: of its base model, which names of tensors may lack.
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
    """Raises SourceError for packed tensors that the configuration doesn't speak of, or if it speaks of none there."""
    for name, tensor in left.items():
        if any(layout.has(tensor, name) for layout in LAYOUTS.values()):
            origin = tensor.origin if isinstance(tensor, Source) else ""
            raise SourceError(
                f"{origin}: tensor {name} is {_short(tensor.dtype)}, as {folder.method} has none; {folder.where} says "
                "nothing else",
                hint="The checkpoint mixes two methods: download it again, or take another one.",
            )
    if not packed:
        raise SourceError(
            f"{folder.where} says that the weights are quantized ({folder.method}), and none is", hint=_DOWNLOAD
        )


def _expression(numbers: _Numbers, name: str, packed: Source) -> WeightExpr:
    """The weight: with its integers where a format of ours holds them, else as floats."""
    read = partial(_dequantized, numbers)
    exact = _exact(numbers)
    expr: WeightExpr
    if exact is None:
        expr = Source(name, numbers.shape, torch.float32, read, packed.origin, numbers.label)
    else:
        codes = partial(_codes, numbers, exact)
        expr = SourceCodes(
            name, numbers.shape, torch.float32, read, packed.origin, numbers.label, format=exact, read_codes=codes
        )
    rank = len(numbers.shape)
    return SwapAxes(expr, rank - 2, rank - 1) if numbers.swapped else expr


def _exact(numbers: _Numbers) -> CodeFormat | None:
    """The format of ours that holds the weight bit for bit: its scales are float16, and so are its offsets.

    Codes of 4 bits with zero points that differ have an offset, ``-zero * scale``, which float16 seldom holds; their
    differences are exact in the narrowest format that has more bits.
    """
    if numbers.order is not None or numbers.kind == "float":
        return None
    scales = numbers.scales()
    if not torch.equal(scales.half().float(), scales):
        return None
    size = numbers.shape[-1]
    if numbers.kind != "int":
        group = _group_of(numbers.kind, numbers.group, size)
        return None if group is None else CodeFormat(8 if numbers.kind == "fp8" else 4, group, kind=numbers.kind)
    zeros = torch.zeros(1, dtype=torch.int32) if numbers.zeros is None else numbers.zeros()
    low, high = numbers.lowest - int(zeros.max()), numbers.largest - int(zeros.min())
    if (low, high) == (FP4[0], FP4[-1]) and (group := _group_of("fp4", numbers.group, size)) is not None:
        return CodeFormat(4, group, kind="fp4")
    plain = [name for name, of in FORMATS.items() if of.integers and not of.levels]
    widths = sorted(plain, key=lambda name: FORMATS[name].bits)
    for storage in widths:
        bits, group = FORMATS[storage].bits, _group_of(storage, numbers.group, size)
        half = 1 << (bits - 1)
        if group is None:
            continue
        if low >= -half and high < half:
            return CodeFormat(bits, group)
        if bits == 4 and (numbers.lowest, numbers.largest) == (0, 15):
            offsets = -zeros * scales
            if torch.equal(offsets.half().float(), offsets):
                return CodeFormat(bits, group, offsets=True)
    return None


def _group_of(storage: Storage, group: int, size: int) -> int | None:
    """The largest groups of a format that divide the weight's own: their scale is the same."""
    stored = FORMATS[storage]
    if group >= size and not stored.multiple and 0 in stored.group_sizes:
        return 0
    fitting = [g for g in stored.group_sizes if g and group % g == 0 and stored.fits(size, g)]
    return max(fitting, default=None)


def _codes(numbers: _Numbers, code_format: CodeFormat) -> Codes:
    """Converts numbers to codes of a format that holds them exactly, as ``_exact`` has found."""
    values, scales = numbers.values(), numbers.scales()
    offsets = None
    if numbers.zeros is not None:
        zeros = numbers.zeros()
        if code_format.offsets:
            offsets = (-zeros * scales).half()
        else:
            values = values.to(torch.int16)
            values -= _spread(zeros.to(torch.int16), numbers)
    width = code_format.group_size or numbers.shape[-1]
    times, groups = max(1, min(numbers.group, numbers.shape[-1]) // width), -(-numbers.shape[-1] // width)

    def repeated(factors: torch.Tensor) -> torch.Tensor:
        return factors.repeat_interleave(times, dim=-1)[..., :groups]

    if code_format.kind != "fp8":
        values = values.to(torch.int8)
    return Codes(
        values,
        repeated(scales.half()),
        None if offsets is None else repeated(offsets),
    )


def _dequantized(numbers: _Numbers) -> torch.Tensor:
    """float32 [.., N, K]: the difference of whole numbers is exact, and the product is rounded once."""
    size = numbers.shape[-1]
    values = numbers.values().reshape(-1, size)
    scales = numbers.scales().reshape(len(values), -1)
    zeros = None if numbers.zeros is None else numbers.zeros().reshape(len(values), -1).float()
    result = torch.empty(values.shape, dtype=torch.float32)
    step = max(1, _CHUNK_ELEMENTS // size)
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        part = values[rows].float() if numbers.table is None else numbers.table[values[rows].int()]
        if zeros is not None:
            part -= _spread(zeros[rows], numbers)
        torch.mul(part, _spread(scales[rows], numbers), out=result[rows])
    return result.reshape(numbers.shape)


def _spread(factors: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    """[.., groups] -> [.., K], or what broadcasts to it."""
    if factors.shape[-1] == 1:
        return factors
    if numbers.order is not None:
        return factors[..., numbers.order()]
    return factors.repeat_interleave(numbers.group, dim=-1)[..., : numbers.shape[-1]]


def unpack_words(words: torch.Tensor, bits: int, count: int, *, padded: bool = False) -> torch.Tensor:
    """int32 [R, words] -> uint8 [R, count]: code i is at bit i * bits, counted through the words of a row.

    ``padded``: a word has only as many codes as fit into it whole.
    """
    if padded and 32 % bits:
        shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
        codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
        return codes.to(torch.uint8).flatten(-2)[:, :count]
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :count]
    if 8 % bits == 0:
        parts = [(octets >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(-2)[:, :count]
    at = torch.arange(count) * bits
    first, second, shift = at // 8, (at // 8 + 1).clamp(max=octets.shape[1] - 1), (at % 8).to(torch.int32)
    result = torch.empty(len(octets), count, dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // max(count, 1))
    for start in range(0, len(octets), step):
        rows = octets[start : start + step]
        two = rows[:, first].to(torch.int32) | (rows[:, second].to(torch.int32) << 8)
        result[start : start + step] = (two >> shift) & ((1 << bits) - 1)
    return result


def _halves(octets: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """uint8 [.., n] -> [.., 2n], each byte as two codes of 4 bits."""
    low, high = octets & 0xF, octets >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def _count(module: _Module, packed: int, bits: int) -> int:
    """The number of codes in ``packed`` 32-bit words. Raises SourceError if it isn't an integer."""
    count, left = divmod(packed * 32, bits)
    if left:
        raise module.wrong(module.values, f"has {packed} words along its inputs, which hold no whole {bits}-bit codes")
    return count


def _groups(module: _Module, size: int, groups: int, scales: Source) -> int:
    """The number of columns that share a scale. Raises SourceError if the number of scales contradicts the
    configuration.
    """
    group = module.scheme.group_size or size
    if -(-size // group) != groups:
        raise module.wrong(
            scales, f"has {groups} groups of {size} columns, and group_size is {module.scheme.group_size or -1}"
        )
    return group


def _zero_points(module: _Module, zeros: Source, read: Read, bits: int) -> Read:
    """Checks zero points once and returns ``read`` unchanged.

    Raises SourceError unless they are in the range of codes, and the middle of it if the file says symmetric.
    """
    points = read()
    low, high, middle = int(points.min()), int(points.max()), 1 << (bits - 1)
    if low < 0 or high >= 1 << bits:
        bad = low if low < 0 else high
        raise module.wrong(zeros, f"has a zero point of {bad}, out of range of {bits} bits (0 to {(1 << bits) - 1})")
    if module.scheme.symmetric and (low, high) != (middle, middle):
        bad = low if low != middle else high
        raise module.wrong(
            zeros,
            f"has a zero point of {bad}, and {module.folder.where} says that weights are symmetric around {middle}: "
            "checkpoint_format, which says how zero points are stored, may be another",
        )
    return read


def _order(module: _Module, index: Source, size: int, group: int, groups: int) -> Read | None:
    """The group of each column, None where groups are neighbours. Raises SourceError for a group that isn't there."""
    indices = index.evaluate().long()
    if indices.shape != (size,):
        columns = indices.shape[0] if indices.dim() == 1 else tuple(indices.shape)
        raise module.wrong(index, f"has {columns} columns, and the weight has {size}")
    if bool((indices == -1).all()) and module.scheme.layout == "packed":
        return None  # llm-compressor's: never set
    if not bool(indices.any()):
        # Never set either. A group has ``group`` columns, so all of them can't be in the first; exllama and vLLM take
        # the columns in order.
        return None
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= groups:
        raise module.wrong(index, f"names group {low if low < 0 else high}, and there are groups 0 to {groups - 1}")
    if torch.equal(indices, torch.arange(size) // group):
        return None
    return lambda: index.evaluate().long()


def _gptq(module: _Module) -> _Numbers:
    bits, qweight = module.scheme.bits, module.values
    if len(qweight.shape) != 2:
        raise module.wrong(qweight, f"has shape {qweight.shape}, not two axes")
    size, outputs = _count(module, qweight.shape[0], bits), qweight.shape[1]
    scales = module.typed(module.part(".scales"), torch.float16, torch.bfloat16, torch.float32)
    if len(scales.shape) != 2 or scales.shape[1] != outputs:
        raise module.wrong(scales, f"has shape {scales.shape}, not (groups, {outputs})")
    groups = scales.shape[0]
    index = module.part(".g_idx") if module.scheme.ordered else module.optional(".g_idx")
    group = _groups(module, size, groups, scales)
    zeros = module.part(".qzeros")
    module.typed(zeros, torch.int32, shape=(groups, -(-outputs * bits // 32)))
    less = int(module.scheme.zeros_less_one)

    def values() -> torch.Tensor:
        return unpack_words(qweight.evaluate().t(), bits, size)

    def zero_points() -> torch.Tensor:
        return unpack_words(zeros.evaluate(), bits, outputs).int().add_(less).t().contiguous()

    return _Numbers(
        (outputs, size),
        f"GPTQ of {bits} bits, {_of_groups(module.scheme.group_size)}",
        values,
        lambda: scales.evaluate().float().t().contiguous(),
        group,
        largest=(1 << bits) - 1,
        zeros=_zero_points(module, zeros, zero_points, bits),
        order=None if index is None else _order(module, index, size, group, groups),
    )


def _awq(module: _Module) -> _Numbers:
    qweight = module.values
    if len(qweight.shape) != 2:
        raise module.wrong(qweight, f"has shape {qweight.shape}, not two axes")
    size, outputs = qweight.shape[0], qweight.shape[1] * 8
    scales = module.typed(module.part(".scales"), torch.float16, torch.bfloat16, torch.float32)
    if len(scales.shape) != 2 or scales.shape[1] != outputs:
        raise module.wrong(scales, f"has shape {scales.shape}, not (groups, {outputs})")
    groups = scales.shape[0]
    group = _groups(module, size, groups, scales)
    zeros = module.optional(".qzeros") if module.scheme.symmetric else module.part(".qzeros")
    if zeros is not None:
        module.typed(zeros, torch.int32, shape=(groups, qweight.shape[1]))

    def in_order(words: torch.Tensor) -> torch.Tensor:
        """int32 [R, N / 8] -> uint8 [N, R]."""
        codes = unpack_words(words, 4, outputs).view(len(words), -1, 8)
        return codes[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1).t().contiguous()

    def zero_points() -> torch.Tensor:
        if zeros is None:
            return torch.full((outputs, groups), 8, dtype=torch.int32)
        return in_order(zeros.evaluate()).int()

    return _Numbers(
        (outputs, size),
        f"AWQ of 4 bits, {_of_groups(module.scheme.group_size)}",
        lambda: in_order(qweight.evaluate()),
        lambda: scales.evaluate().float().t().contiguous(),
        group,
        largest=15,
        zeros=zero_points,
    )


def _scales_of(module: _Module, scale: Source, shape: tuple[int, ...]) -> tuple[Read, int]:
    """Scales [.., N, groups] in float32 of a weight [.., N, K], and how many columns a group has.

    A file has one for the weight, each member of a stack, each channel, each group or each block. Raises SourceError
    naming the tensor if its shape is none of what the configuration says.
    """
    exponents = (torch.uint8,) if module.scheme.layout == "mxfp8" else ()
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    module.typed(scale, *floats, torch.float8_e8m0fnu, *exponents)
    *lead, rows, size = shape
    block = module.scheme.block
    factors: Read = lambda: scale.evaluate().float()  # noqa: E731
    if scale.dtype not in floats:
        factors = _powers_of_two(module, scale)

    def made(view: tuple[int, ...], step: int = 1) -> Read:
        def read() -> torch.Tensor:
            value = factors().reshape(view)
            if step > 1:
                value = value.repeat_interleave(step, dim=-2)[..., :rows, :]
            return value.expand(*lead, rows, view[-1])

        return read

    has = scale.shape
    if block is not None and has == (*lead, -(-rows // block[0]), -(-size // block[1])):
        return made(has, block[0]), block[1]
    if block is None and module.scheme.group_size:
        if has == (*lead, rows, -(-size // module.scheme.group_size)):
            return made(has), module.scheme.group_size
    elif block is None:
        if scale.shape in ((), (1,), (1, 1), (1,) * len(shape)):
            return made((1,) * len(shape)), size
        if lead and has in (tuple(lead), (*lead, 1), (*lead, 1, 1)):
            return made((*lead, 1, 1)), size
        if has in ((*lead, rows), (*lead, rows, 1)):
            return made((*lead, rows, 1)), size
    grouping = f"blocks of {block[0]} x {block[1]}" if block else _of_groups(module.scheme.group_size)
    raise module.wrong(scale, f"has shape {has}, which isn't one of a weight {shape} with {grouping}")


def _packed(module: _Module) -> _Numbers:
    bits, words = module.scheme.bits, module.typed(module.values, torch.int32)
    rank = len(words.shape)
    shape = tuple(int(n) for n in module.part(".weight_shape").evaluate().reshape(-1))
    if rank not in (2, 3) or len(shape) != rank or min(shape) < 1 or words.shape[:-1] != shape[:-1]:
        raise module.wrong(words, f"has shape {words.shape}, and weight_shape says {shape}")
    size = shape[-1]
    padded = _is_padded(module, size, words.shape[-1])
    scales, group = _scales_of(module, module.part(".weight_scale"), shape)
    groups = 1 if group == size else -(-size // group)
    index = module.optional(".weight_g_idx")
    zeros = module.optional(".weight_zero_point")
    if zeros is None and not module.scheme.symmetric:
        zeros = module.part(".weight_zero_point")
    middle = 1 << (bits - 1)

    def values() -> torch.Tensor:
        return unpack_words(words.evaluate().flatten(0, -2), bits, size, padded=padded).reshape(shape)

    def zero_points() -> torch.Tensor:
        if zeros is None:
            return torch.full((1,) * rank, middle, dtype=torch.int32).expand(*shape[:-1], groups)
        value = zeros.evaluate()
        if value.dtype != torch.int32:  # as it is, not packed
            return (value.int() + middle).reshape(_broadcast(module, zeros, (*shape[:-1], groups)))
        columns = value.transpose(-1, -2).flatten(0, -2)  # [.. groups, words]
        codes = unpack_words(columns, bits, shape[-2], padded=padded)
        return codes.int().reshape(*shape[:-2], groups, shape[-2]).transpose(-1, -2).contiguous()

    if zeros is not None and zeros.dtype == torch.int32:
        needed = -(-shape[-2] // (32 // bits)) if padded else -(-shape[-2] * bits // 32)
        module.typed(zeros, torch.int32, shape=(*shape[:-2], needed, groups))
    return _Numbers(
        shape,
        f"pack-quantized of {bits} bits, {_of_groups(module.scheme.group_size)}",
        values,
        scales,
        group,
        largest=(1 << bits) - 1,
        zeros=zero_points if zeros is None else _zero_points(module, zeros, zero_points, bits),
        order=None if index is None else _order(module, index, size, group, groups),
    )


def _is_padded(module: _Module, size: int, words: int) -> bool:
    """Returns True if codes don't cross words, by the number of words a row.

    Raises SourceError if both readings fit, or neither.
    """
    bits = module.scheme.bits
    dense, whole = -(-size * bits // 32), -(-size // (32 // bits))
    if words not in (dense, whole):
        raise module.wrong(module.values, f"has {words} words a row, and {size} codes of {bits} bits are {dense}")
    if dense == whole and dense > 1 and 32 % bits:
        raise module.wrong(
            module.values,
            f"has {words} words a row, and {size} codes of {bits} bits are so many with padding and without: which it "
            "is can't be told",
        )
    return words != dense


def _broadcast(module: _Module, zeros: Source, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which zero points that aren't packed go with scales. Raises SourceError if they don't."""
    if zeros.shape == wanted:
        return wanted
    if wanted[-1] == 1 and zeros.shape == wanted[:-1]:
        return wanted
    if wanted[-1] == 1 and zeros.shape in ((), (1,)):
        return (1,) * len(wanted)
    raise module.wrong(zeros, f"has shape {zeros.shape}, and the scales are {wanted}")


def _int(module: _Module) -> _Numbers:
    weight, bits = module.values, module.scheme.bits
    if len(weight.shape) < 2:
        raise module.wrong(weight, f"has shape {weight.shape}, not two axes or more")
    scales, group = _scales_of(module, module.part(".weight_scale"), weight.shape)
    groups = 1 if group == weight.shape[-1] else -(-weight.shape[-1] // group)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    zeros = module.optional(".weight_zero_point")
    if zeros is None and not module.scheme.symmetric:
        zeros = module.part(".weight_zero_point")

    def values() -> torch.Tensor:
        value = weight.evaluate()
        if bits < 8 and (int(value.min()) < low or int(value.max()) > high):
            raise module.wrong(weight, f"has values beyond {low} to {high}, which {bits} bits hold")
        return value

    def zero_points() -> torch.Tensor:
        assert zeros is not None
        per_group = (*weight.shape[:-1], groups)
        return zeros.evaluate().int().reshape(_broadcast(module, zeros, per_group)).expand(per_group).contiguous()

    if zeros is not None:
        module.typed(zeros, torch.int8, torch.int32, torch.int64)
        if module.scheme.symmetric and bool(zero_points().any()):
            raise module.wrong(zeros, f"isn't zero, and {module.folder.where} says that the weights are symmetric")
        shifted = zero_points()
        if int(shifted.min()) < low or int(shifted.max()) > high:
            raise module.wrong(zeros, f"has a zero point out of range of {bits} bits ({low} to {high})")
    label = f"int-quantized of {bits} bits, {_of_groups(module.scheme.group_size)}"
    return _Numbers(weight.shape, label, values, scales, group, low, high, None if zeros is None else zero_points)


def _fp8(module: _Module) -> _Numbers:
    weight, block = module.values, module.scheme.block
    ends = ("_scale_inv", "_scale")
    scale = module.part(*(ends if module.folder.method == "FP8" else ends[::-1]))
    if len(weight.shape) < 2:
        raise module.wrong(weight, f"has shape {weight.shape}, not two axes or more")
    # Stacks of experts whose parameter is [E, K, N] have a scale for each of the last axis.
    *lead, inputs, outputs = weight.shape
    swapped = bool(lead) and block is None and scale.shape == (*lead, 1, outputs) and outputs > 1
    shape = (*lead, outputs, inputs) if swapped else weight.shape

    def values() -> torch.Tensor:
        value = weight.evaluate()  # which must have no NaN
        return value.transpose(-1, -2) if swapped else value

    if swapped:
        scales: Read = lambda: scale.evaluate().float().transpose(-1, -2)  # noqa: E731
        group = inputs
    else:
        scales, group = _scales_of(module, scale, weight.shape)
    grouping = f"in blocks of {block[0]} x {block[1]}" if block else "a scale for " + _of_whole(module, scale)
    return _Numbers(shape, f"FP8, {grouping}", values, scales, group, kind="fp8", swapped=swapped)


def _of_whole(module: _Module, scale: Source) -> str:
    if module.scheme.group_size:
        return f"{module.scheme.group_size} inputs"
    numbers = 1
    for n in scale.shape:
        numbers *= n
    return "each weight" if numbers == 1 else "each output"


def _e2m1(octets: torch.Tensor) -> torch.Tensor:
    """Unpacks E2M1: uint8 [.., n] -> int8 [.., 2n], each element its value times 2; the low nibble comes first."""
    return torch.tensor(TWICE_E2M1, dtype=torch.int8)[_halves(octets).int()]


def _nvfp4(module: _Module) -> _Numbers:
    return _fp4_of_16(module, ".weight_scale", ".weight_global_scale", inverse=True)


def _nvfp4_of_modelopt(module: _Module) -> _Numbers:
    return _fp4_of_16(module, ".weight_scale", ".weight_scale_2", inverse=False)


def _fp4_of_16(module: _Module, first: str, second: str, *, inverse: bool) -> _Numbers:
    packed = module.typed(module.values, torch.uint8)
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    scale = module.typed(module.part(first), torch.float8_e4m3fn, shape=(*shape[:-1], -(-shape[-1] // 16)))
    whole = module.typed(module.part(second), torch.float32)
    if whole.shape not in ((), (1,)):
        raise module.wrong(whole, f"has shape {whole.shape}, not one number")
    if not float(whole.evaluate()) > 0:
        raise module.wrong(whole, f"is {float(whole.evaluate())}, not above 0")

    def scales() -> torch.Tensor:
        factor = whole.evaluate().reshape(1)
        fine = scale.evaluate().float()
        return (fine / factor if inverse else fine * factor) * 0.5  # values are twice as large

    return _Numbers(shape, "NVFP4", lambda: _e2m1(packed.evaluate()), scales, 16, -12, 12)


def _powers_of_two(module: _Module, scale: Source) -> Read:
    """2^(value - 127) of a scale that is an exponent (E8M0), as bytes or as F8_E8M0.

    Raises SourceError for 255, which is NaN.
    """
    if bool((scale.evaluate().view(torch.uint8) == 255).any()):
        raise module.wrong(scale, "has a scale of 255, which is NaN")

    def read() -> torch.Tensor:
        bits = scale.evaluate().view(torch.uint8).int()
        return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)

    return read


def _exponents(module: _Module, scale: Source) -> Read:
    """Half of ``_powers_of_two``, since values are twice as large."""
    factors = _powers_of_two(module, scale)
    return lambda: factors() * 0.5


_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def _mxfp4(module: _Module) -> _Numbers:
    packed = module.typed(module.values, torch.uint8)
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    scale = module.typed(module.part(".weight_scale"), *_E8M0, shape=(*shape[:-1], -(-shape[-1] // 32)))
    return _Numbers(shape, "MXFP4", lambda: _e2m1(packed.evaluate()), _exponents(module, scale), 32, -12, 12)


def _mxfp4_blocks(module: _Module) -> _Numbers:
    blocks = module.values
    if len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise module.wrong(blocks, f"has shape {blocks.shape}, not (experts, outputs, blocks, 16)")
    experts, outputs, count, _ = blocks.shape
    scale = module.typed(module.part("_scales"), *_E8M0, shape=(experts, outputs, count))

    def values() -> torch.Tensor:
        return _e2m1(blocks.evaluate()).flatten(-2)

    shape = (experts, outputs, 32 * count)
    return _Numbers(shape, "MXFP4", values, _exponents(module, scale), 32, -12, 12, swapped=True)


def _bitsandbytes(module: _Module) -> _Numbers:
    weight = module.values
    if weight.dtype == torch.int8:
        if len(weight.shape) != 2:
            raise module.wrong(weight, f"has shape {weight.shape}, not two axes")
        scb = module.typed(module.part(".SCB"), torch.float32, torch.float16, shape=(weight.shape[0],))
        order = module.optional(".weight_format")
        if order is not None and int(order.evaluate().reshape(-1)[0]) != 0:
            raise module.wrong(order, "isn't 0: the rows of its weight are in the order of a GPU's tiles")
        size = weight.shape[1]
        rows: Read = lambda: (scb.evaluate().float() / 127)[:, None]  # noqa: E731
        return _Numbers(weight.shape, "bitsandbytes of 8 bits", weight.evaluate, rows, size, -128, 127)
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
        largest = _nested(module, state, absmax, state_tensor)
    label = f"bitsandbytes {kind}, blocks of {block}"

    def codes() -> torch.Tensor:
        return _halves(weight.evaluate().reshape(-1), high_first=True)[:count]

    if shape[1] % block == 0:
        ours = torch.equal(table, torch.tensor(NF4))
        return _Numbers(
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

    return _Numbers(shape, label, flat, lambda: torch.ones(shape[0], 1), shape[1], kind="float")


@dataclass(frozen=True)
class _State:
    """The JSON state that bitsandbytes stores for a 4-bit weight, next to its tensors."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int
    nested_offset: float


def _state(module: _Module, tensor: Source) -> _State:
    """The state in a tensor of JSON's bytes. Raises SourceError naming it and the field that is wrong."""
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


def _nested(module: _Module, state: _State, absmax: Source, tensor: Source) -> Read:
    """The largest magnitudes of blocks that are places in a table, with a factor for some hundred and an offset."""
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


def _of_groups(size: int) -> str:
    return f"groups of {size}" if size else "whole rows"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LAYOUTS: Mapping[Layout, _Layout] = {
    "gptq": _Layout(".qweight", (torch.int32,), ".weight", _gptq),
    "awq": _Layout(".qweight", (torch.int32,), ".weight", _awq),
    "packed": _Layout(".weight_packed", (torch.int32,), ".weight", _packed),
    "int": _Layout(".weight", (torch.int8,), ".weight", _int),
    "fp8": _Layout("", (torch.float8_e4m3fn,), "", _fp8),
    "nvfp4": _Layout(".weight_packed", (torch.uint8,), ".weight", _nvfp4),
    "nvfp4-modelopt": _Layout(".weight", (torch.uint8,), ".weight", _nvfp4_of_modelopt),
    "mxfp4": _Layout(".weight_packed", (torch.uint8,), ".weight", _mxfp4),
    "mxfp4-modelopt": _Layout(".weight", (torch.uint8,), ".weight", _mxfp4),
    "mxfp8": _Layout("", (torch.float8_e4m3fn,), "", _fp8),
    "mxfp4-blocks": _Layout("_blocks", (torch.uint8,), "", _mxfp4_blocks),
    "bnb": _Layout(".weight", (torch.uint8, torch.int8), ".weight", _bitsandbytes),
}
"""Adding a layout is an entry here, and one of the table in quantization_config.py for the method that has it."""
