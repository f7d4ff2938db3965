"""Checkpoints of integers: GPTQ, AWQ, and compressed-tensors' pack-quantized and int-quantized.

    GPTQ          qweight  int32 [K * bits / 32, N]   code k at bit k * bits of a column: those of 3 bits cross words
                  qzeros   int32 [groups, N * bits / 32], in version 1 less 1; scales f16 [groups, N]; g_idx int32 [K]
    AWQ (gemm)    qweight  int32 [K, N / 8]           nibbles of a word are columns 0, 2, 4, 6, 1, 3, 5, 7 of eight
                  qzeros   int32 [groups, N / 8], the same; scales f16 [groups, N]
    pack-         weight_packed int32 [N, words]      value + 2^(bits - 1), dense; older files pad words of odd widths
     quantized    weight_scale [N, groups]; weight_zero_point packed along N; weight_shape; weight_g_idx [K]
    int-, float-  weight int8 or e4m3 [N, K]; weight_scale of the weight, a channel, a group or a block

Sources: GPTQModel (utils/model_dequant.py), AutoAWQ (packing_utils.py), compressed-tensors 0.20 (compressors/).
"""

from __future__ import annotations

import torch

from enginewright.passes.ir.weights import Source

from .packed_module import CHUNK_ELEMENTS, PackedModule, PackedNumbers, Read, group_label, scales_of

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_words(words: torch.Tensor, bits: int, count: int, *, padded: bool = False) -> torch.Tensor:
    """Unpacks int32 [R, words] to uint8 [R, count]: code i is at bit i * bits, counted through the words of a row.

    ``padded``: True if a word has only as many codes as fit into it whole.
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
    step = max(1, CHUNK_ELEMENTS // max(count, 1))
    for start in range(0, len(octets), step):
        rows = octets[start : start + step]
        two = rows[:, first].to(torch.int32) | (rows[:, second].to(torch.int32) << 8)
        result[start : start + step] = (two >> shift) & ((1 << bits) - 1)
    return result


def _count(module: PackedModule, packed: int, bits: int) -> int:
    """Returns the number of codes in ``packed`` 32-bit words. Raises SourceError if it isn't a whole number."""
    count, left = divmod(packed * 32, bits)
    if left:
        raise module.wrong(module.values, f"has {packed} words along its inputs, which hold no whole {bits}-bit codes")
    return count


def _groups(module: PackedModule, size: int, groups: int, scales: Source) -> int:
    """Returns the number of columns that share a scale.

    Raises SourceError if the number of scales contradicts the configuration.
    """
    group = module.scheme.group_size or size
    if -(-size // group) != groups:
        raise module.wrong(
            scales, f"has {groups} groups of {size} columns, and group_size is {module.scheme.group_size or -1}"
        )
    return group


def _zero_points(module: PackedModule, zeros: Source, read: Read, bits: int) -> Read:
    """Checks zero points, and returns ``read`` unchanged.

    Args:
        module: the packed weight.
        zeros: the tensor with the zero points.
        read: reads them.
        bits: the bits of a code.

    Raises SourceError if one is outside the range of codes, or isn't the middle one of a symmetric scheme.
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


def _order(module: PackedModule, index: Source, size: int, group: int, groups: int) -> Read | None:
    """Returns a function that reads the group of each column; None if groups are neighbouring columns.

    Raises SourceError for a group that doesn't exist.
    """
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


def _column_scales(module: PackedModule, outputs: int) -> Source:
    """Returns the scales [groups, outputs] of GPTQ and AWQ. Raises SourceError for another shape or type."""
    scales = module.typed(module.part(".scales"), torch.float16, torch.bfloat16, torch.float32)
    if len(scales.shape) != 2 or scales.shape[1] != outputs:
        raise module.wrong(scales, f"has shape {scales.shape}, not (groups, {outputs})")
    return scales


def read_gptq(module: PackedModule) -> PackedNumbers:
    """Reads a weight in GPTQ's layout: codes of 2, 3, 4 or 8 bits, packed along K."""
    bits, qweight = module.scheme.bits, module.matrix()
    size, outputs = _count(module, qweight.shape[0], bits), qweight.shape[1]
    scales = _column_scales(module, outputs)
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

    return PackedNumbers(
        (outputs, size),
        f"GPTQ of {bits} bits, {group_label(module.scheme.group_size)}",
        values,
        lambda: scales.evaluate().float().t().contiguous(),
        group,
        largest=(1 << bits) - 1,
        zeros=_zero_points(module, zeros, zero_points, bits),
        order=None if index is None else _order(module, index, size, group, groups),
    )


def read_awq(module: PackedModule) -> PackedNumbers:
    """Reads a weight in AWQ's layout for GEMM: codes of 4 bits, packed along N."""
    qweight = module.matrix()
    size, outputs = qweight.shape[0], qweight.shape[1] * 8
    scales = _column_scales(module, outputs)
    groups = scales.shape[0]
    group = _groups(module, size, groups, scales)
    zeros = module.optional(".qzeros") if module.scheme.symmetric else module.part(".qzeros")
    if zeros is not None:
        module.typed(zeros, torch.int32, shape=(groups, qweight.shape[1]))

    def in_order(words: torch.Tensor) -> torch.Tensor:
        """Unpacks words and undoes the order of columns: int32 [R, N / 8] -> uint8 [N, R]."""
        codes = unpack_words(words, 4, outputs).view(len(words), -1, 8)
        return codes[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1).t().contiguous()

    def zero_points() -> torch.Tensor:
        if zeros is None:
            return torch.full((outputs, groups), 8, dtype=torch.int32)
        return in_order(zeros.evaluate()).int()

    return PackedNumbers(
        (outputs, size),
        f"AWQ of 4 bits, {group_label(module.scheme.group_size)}",
        lambda: in_order(qweight.evaluate()),
        lambda: scales.evaluate().float().t().contiguous(),
        group,
        largest=15,
        zeros=zero_points,
    )


def read_packed(module: PackedModule) -> PackedNumbers:
    """Reads a weight in the layout "pack-quantized" of compressed-tensors: integers packed into 32-bit words."""
    bits, words = module.scheme.bits, module.typed(module.values, torch.int32)
    rank = len(words.shape)
    shape = tuple(int(n) for n in module.part(".weight_shape").evaluate().reshape(-1))
    if rank not in (2, 3) or len(shape) != rank or min(shape) < 1 or words.shape[:-1] != shape[:-1]:
        raise module.wrong(words, f"has shape {words.shape}, and weight_shape says {shape}")
    size = shape[-1]
    padded = _is_padded(module, size, words.shape[-1])
    scales, group = scales_of(module, module.part(".weight_scale"), shape)
    groups = 1 if group == size else -(-size // group)
    index = module.optional(".weight_g_idx")
    zeros = module.optional(".weight_zero_point") if module.scheme.symmetric else module.part(".weight_zero_point")
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
    return PackedNumbers(
        shape,
        f"pack-quantized of {bits} bits, {group_label(module.scheme.group_size)}",
        values,
        scales,
        group,
        largest=(1 << bits) - 1,
        zeros=zero_points if zeros is None else _zero_points(module, zeros, zero_points, bits),
        order=None if index is None else _order(module, index, size, group, groups),
    )


def _is_padded(module: PackedModule, size: int, words: int) -> bool:
    """Returns True if each word has only whole codes and padding; False if codes cross words.

    Args:
        module: the packed weight.
        size: the codes of a row.
        words: the 32-bit words of a row, which tell the two apart.

    Raises SourceError if both are possible, or neither.
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


def _broadcast(module: PackedModule, zeros: Source, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in which zero points that aren't packed broadcast to the scales' shape ``wanted``.

    Raises SourceError if they don't.
    """
    if zeros.shape == wanted:
        return wanted
    if wanted[-1] == 1 and zeros.shape == wanted[:-1]:
        return wanted
    if wanted[-1] == 1 and zeros.shape in ((), (1,)):
        return (1,) * len(wanted)
    raise module.wrong(zeros, f"has shape {zeros.shape}, and the scales are {wanted}")


def read_int(module: PackedModule) -> PackedNumbers:
    """Reads a weight in the layout "int-quantized" of compressed-tensors: an int8 for each value, of any number of
    bits.
    """
    weight, bits = module.stack(), module.scheme.bits
    scales, group = scales_of(module, module.part(".weight_scale"), weight.shape)
    groups = 1 if group == weight.shape[-1] else -(-weight.shape[-1] // group)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    zeros = module.optional(".weight_zero_point") if module.scheme.symmetric else module.part(".weight_zero_point")

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
    label = f"int-quantized of {bits} bits, {group_label(module.scheme.group_size)}"
    return PackedNumbers(weight.shape, label, values, scales, group, low, high, None if zeros is None else zero_points)
