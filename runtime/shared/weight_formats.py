"""The table of weight formats: their use in a recipe, and their storage in a bundle. Doesn't need torch.

``passes/formats/rounding.py`` has the rounding to each format; each target has its own kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from .codebooks import CODEBOOKS, VALUES, Codebook, CodebookStorage
from .dtypes import DTYPES, Dtype
from .panel_layouts import Layout

Storage = Literal[
    "f32", "bf16", "int8", "int4", "fp8", "nf4", "int5", "int6", "iq4", "fp4", "int3", "int2", CodebookStorage
]
Activation = Literal["float", "bf16", "int8", "fp8"]


class StoredFormat(msgspec.Struct, frozen=True):
    """A weight format.

    Attributes:
        dtype: the type of its values; for a codebook, of the bytes of blocks.
        layout: the layout in which the cpu target's products read them. None if no kernel does: then a bundle stores
            ``blocks``, which become floats when they are loaded.
        shifted: the type of values with offsets; None if the format has none.
        activation: the type of the activations that are multiplied with the values.
        group_sizes: the numbers of values along K that may share a float16 scale; 0 is a scale per row. Empty: no
            scales.
        multiple: the number of values that kernels read at a time. K is a multiple of it and of the groups; 0: any K.
        codes: the number that each value stands for, before scaling; empty if values stand for themselves.
        codebook: the vectors that values stand for, and the blocks that store them. Such weights are only kept from
            files that have these blocks; nothing is rounded to them.
        levels: the 8-bit integers that values may be, rising, if they are stored as indices into this list.
        sparse: True if there are products with two of four values.
        since: the version of weights/index.json that added it.
        least_gpu: the compute capability from which GPUs have instructions for it; "" if all have.
        everywhere: True if every target supports it.
    """

    dtype: Dtype
    layout: Layout | None
    shifted: Dtype | None = None
    activation: Activation = "float"
    group_sizes: tuple[int, ...] = ()
    multiple: int = 0
    codes: tuple[float, ...] = ()
    codebook: Codebook | None = None
    levels: tuple[int, ...] = ()
    sparse: bool = False
    since: int = 1
    least_gpu: str = ""
    everywhere: bool = True

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """The types that its values may have, without and with offsets."""
        return (self.dtype,) if self.shifted is None else (self.dtype, self.shifted)

    @property
    def bits(self) -> int:
        """The bits of a stored value."""
        return DTYPES[self.dtype].bits

    @property
    def multiplied_bits(self) -> int:
        """The bits of the integers that products multiply: those of values, or of the entries of ``levels``."""
        return 8 if self.levels else self.bits

    @property
    def integers(self) -> bool:
        """True if products multiply its values as integers, with rounded activations."""
        return self.activation == "int8"

    @property
    def scaled_floats(self) -> bool:
        """True if values with scales stand for floats, which are multiplied with unrounded activations."""
        return bool(self.group_sizes) and not self.integers

    def fits(self, inputs: int, group_size: int) -> bool:
        """Returns True if a weight with K = ``inputs`` can be stored in groups of ``group_size`` values along K."""
        if not self.multiple:
            return True
        known = group_size > 0 and group_size in (*self.group_sizes, inputs)
        return known and inputs % group_size == 0 and inputs % self.multiple == 0


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""4-bit NormalFloat of QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, appendix E): quantiles of
a normal distribution, and 0."""

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of llama.cpp's IQ4_NL and IQ4_XS (``kvalues_iq4nl`` in ggml-common.h)."""

TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Code of e2m1 -> twice its number. MXFP4 and NVFP4 use it (OCP Microscaling Formats 1.0, section 5.3.3). -0 is 0."""

FP4 = tuple(sorted(set(TWICE_E2M1)))
"""The distinct numbers of ``TWICE_E2M1``, ascending."""

FORMATS: Mapping[Storage, StoredFormat] = {
    "f32": StoredFormat("f32", "panel32", sparse=True),
    "bf16": StoredFormat("bf16", "panel32x2", activation="bf16", sparse=True, least_gpu="8.0"),
    "int8": StoredFormat("i8", "panel32x4", activation="int8", group_sizes=(0, 16, 32, 64), sparse=True),
    "int4": StoredFormat(
        "i4",
        "panel32x8",
        "u4",
        activation="int8",
        group_sizes=(0, 16, 32, 64, 128),
        multiple=8,
        sparse=True,
        least_gpu="8.0",
    ),
    "fp8": StoredFormat("fp8", "panel32", group_sizes=(0, 32, 64), since=4, least_gpu="8.9"),
    "nf4": StoredFormat("u4", None, group_sizes=(64,), codes=NF4, since=5),
    "int5": StoredFormat(
        "i5", "planes32", "u5", activation="int8", group_sizes=(16, 32, 64), multiple=16, since=6, everywhere=False
    ),
    "int6": StoredFormat(
        "i6", "planes32", activation="int8", group_sizes=(16, 32, 64), multiple=16, since=6, everywhere=False
    ),
    "iq4": StoredFormat(
        "iq4",
        "panel32x8",
        activation="int8",
        group_sizes=(16, 32, 64),
        multiple=8,
        levels=IQ4,
        since=6,
        everywhere=False,
    ),
    "fp4": StoredFormat(
        "fp4",
        "panel32x8",
        activation="int8",
        group_sizes=(16, 32, 64),
        multiple=8,
        levels=FP4,
        since=6,
        everywhere=False,
    ),
    "int3": StoredFormat(
        "i3", "planes32", "u3", activation="int8", group_sizes=(16, 32, 64, 128), multiple=16, since=7, everywhere=False
    ),
    "int2": StoredFormat(
        "i2", "planes32", "u2", activation="int8", group_sizes=(16, 32, 64, 128), multiple=16, since=7, everywhere=False
    ),
    **{
        name: StoredFormat("i8", None, group_sizes=(VALUES,), multiple=VALUES, codebook=codebook, since=codebook.since)
        for name, codebook in CODEBOOKS.items()
    },
}

SCALE_BLOCKS = (8, 16)
"""The numbers of groups along K that a super-block of GGUF's K-quants may have.

The groups of a super-block share a float16, and each has a signed byte that it is multiplied by
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

FORMAT_OF: Mapping[str, Storage] = {dtype: name for name, of in FORMATS.items() if of.layout for dtype in of.dtypes}
"""Type of stored values -> the weight format with that type, for formats that have kernels."""

SCALED: frozenset[str] = frozenset(dtype for dtype, name in FORMAT_OF.items() if FORMATS[name].group_sizes)
"""The types of stored values (keys of ``FORMAT_OF``) whose format has scales."""
