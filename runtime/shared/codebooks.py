"""Super-blocks of 256 weights that are vectors of a codebook: the block types IQ2_XXS to IQ3_S of GGUF files.

A block begins with a float16 d. Each 8 weights are one vector of 8 magnitudes, or two of 4, and 8 signs; groups of 16
or 32 weights share an integer s. A weight is ``d * unit * (1 + 2 s) * sign * magnitude``. Bytes of a block:

    iq2_xxs   d, then for each 32 weights 8 bytes: indices of 8 bits, 4 times 7 signs, s
    iq2_xs    d, for each 8 weights 2 bytes: an index of 9 bits, 7 signs; then s of 4 bits
    iq2_s     d, 32 indices, 32 times 8 signs, two more bits of each index, s of 4 bits
    iq3_xxs   d, 64 indices, then for each 32 weights 4 bytes: 4 times 7 signs, s
    iq3_s     d, 64 indices, a ninth bit of each, 32 times 8 signs, s of 4 bits

If 7 signs are stored, the eighth is their parity. Source of layouts and codebooks: ``block_iq2_xxs`` to
``block_iq3_s`` and ``iq2xxs_grid`` to ``iq3s_grid`` in llama.cpp
(https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

CodebookStorage = Literal["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"]

VALUES = 256
"""Weights of a block."""

_SIGNED = 8
"""Number of adjacent weights whose signs are stored together."""

_CHUNK_BLOCKS = 256
"""Blocks that are expanded at a time: 256 KiB of floats, which stay in caches."""

Bytes = npt.NDArray[np.uint8]


class BitField(msgspec.Struct, frozen=True):
    """Unsigned integers of equal width, packed into consecutive little-endian words of a block.

    Attributes:
        start: offset of the first word in the block, in bytes.
        word: size of a word in bytes.
        width: bits of an integer.
        per_word: number of integers in a word, the first in the lowest bits.
        first: number of unused bits below the first integer of a word.
    """

    start: int
    word: int
    width: int
    per_word: int = 1
    first: int = 0

    def read(self, blocks: Bytes, count: int) -> npt.NDArray[np.intp]:
        """Reads ``count`` integers of each block: [n, bytes] -> [n, count]."""
        size = count // self.per_word * self.word
        words = np.ascontiguousarray(blocks[:, self.start : self.start + size]).view(f"<u{self.word}")
        places = (self.first + self.width * np.arange(self.per_word)).astype(words.dtype)
        fields: npt.NDArray[Any] = words[..., None] >> places & words.dtype.type((1 << self.width) - 1)
        return fields.reshape(len(blocks), count).astype(np.intp)


class Codebook(msgspec.Struct, frozen=True):
    """A block type with a codebook.

    Attributes:
        magnitudes: the values that elements of vectors may have, rising.
        length: the number of elements of a vector.
        members: the set of vectors, with a bit for each combination of magnitudes, compressed by zlib, in base 85. An
            element is a digit of a combination's number, the first the lowest; a vector's index counts the members
            before it.
        block_bytes: the bytes of a block.
        index: the vectors' indices; ``high`` has more bits of each, above these.
        signs: the signs of 8 weights, 1 for negative. With a width of 7, the eighth makes their number even.
        scales: the integers s, of which a block has ``groups``.
        unit: the factor of all weights.
        since: the version of weights/index.json that added it.
    """

    magnitudes: tuple[int, ...]
    length: int
    members: str
    block_bytes: int
    index: BitField
    signs: BitField
    scales: BitField
    groups: int
    unit: float
    high: BitField | None = None
    since: int = 8

    def join(self, values: npt.NDArray[np.int8], scales: npt.NDArray[np.float16]) -> Bytes:
        """Builds blocks from their two parts: [.., blocks * block_bytes].

        Args:
            values: the bytes of the blocks without d, [.., blocks * (block_bytes - 2)].
            scales: the d of each block, [.., blocks].
        """
        blocks = np.empty((*scales.shape, self.block_bytes), np.uint8)
        blocks[..., :2] = scales[..., None].view(np.uint8)
        blocks[..., 2:] = values.view(np.uint8).reshape(*scales.shape, -1)
        return blocks

    def expand(self, blocks: Bytes) -> npt.NDArray[np.float32]:
        """Returns the exact weights of blocks: [.., bytes of a block] -> float32 [.., 256]."""
        flat = blocks.reshape(-1, self.block_bytes)
        weights = np.empty((len(flat), VALUES), np.float32)
        for start in range(0, len(flat), _CHUNK_BLOCKS):
            weights[start : start + _CHUNK_BLOCKS] = self._expand(flat[start : start + _CHUNK_BLOCKS])
        return weights.reshape(*blocks.shape[:-1], VALUES)

    def _expand(self, blocks: Bytes) -> npt.NDArray[np.float32]:
        count = VALUES // self.length
        index = self.index.read(blocks, count)
        if self.high is not None:
            index |= self.high.read(blocks, count) << self.index.width
        weights = _vectors(self)[index].reshape(len(blocks), VALUES // _SIGNED, _SIGNED)
        weights *= _signs(self.signs.width)[self.signs.read(blocks, VALUES // _SIGNED)]
        scales = np.float32(self.unit) * (1 + 2 * self.scales.read(blocks, self.groups)).astype(np.float32)
        scales *= np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        return (weights.reshape(len(blocks), self.groups, -1) * scales[..., None]).reshape(len(blocks), VALUES)


@cache
def _vectors(codebook: Codebook) -> npt.NDArray[np.float32]:
    """Returns the vectors of a codebook, [vectors, elements]."""
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(codebook.members)), np.uint8))
    base = len(codebook.magnitudes)
    digits = np.flatnonzero(bits)[:, None] // base ** np.arange(codebook.length) % base
    vectors: npt.NDArray[np.float32] = np.array(codebook.magnitudes, np.float32)[digits]
    return vectors


@cache
def _signs(width: int) -> npt.NDArray[np.float32]:
    """Returns a table of the signs (1 or -1) of 8 weights for each stored integer: [2^width, 8].

    With a ``width`` of 7, the eighth sign makes the number of negative ones even.
    """
    bits = np.arange(1 << width)[:, None] >> np.arange(_SIGNED) & 1
    if width < _SIGNED:
        bits[:, -1] = bits.sum(-1) & 1
    return (1 - 2 * bits).astype(np.float32)


_IQ2_XXS = (
    "c-nPRORj`4470MbdWwiuj~R8vF<3s$DPNNQV8mEdDvh1mfzMz4@MsNM4-kL~Dg?0u3Z<Q}s#5&i%a^YL7=qILyw)W4Cso8iRnlpCLd`c4Du;"
    "C<RlH?aajd+e<FY7)k8>WSTt@47wX1jPqB41q=2e+&9hy;#r#nzQ(d`wV2I-N(E<X_7hks$x7)Do8!;TEvZcdv+$;Bf*s-;99+U-&7)=?Kns"
    "oS&M%ZZjW8ztGaG<oin^)>q~!#84@<5Q?C;cAe-jqH$lW6s<jvF<nQc*Z$~yKl@H%B$)D{-`Y{-_v~Aze0c0{sHUUCpi"
)
_IQ2_XS = (
    "c-mc2ORj`4470L|dWwh@;*?QWh*MOoP)|Aew9xme83;|{*iP^L>UVu^J$f&9<)%0;rYcZH@zkTcz*1-`0#F4vd)cqIa~EY0S(m36us~sl4e+"
    "uqnt+xnD5p1ifdk&k2^cqyDKl&hVwLuN#<u{Y#82-D2r2AS*#~B;6>b%zZ?$An2Qav5OyP;?IjC1*OUa>YNXBOJs!l*N%2M9ag1pZ#qbS<pD"
    "ODX)Ys@FiGwcn?g7z}ZUJ85J?WuXe7)kq!xj_MC=sehbo`f6hw91-EjVApg;SBK(#S-ctqy5bslAAu_xaBeODLPcR%XL4jpOCvsj1dP@iIwg"
    "yVBr<uBI!nKMuUZZ1qQNNP<bV}FGN4KvRv{ky>(2~*Gt;x6q$P={6Cb#@3Dfxx_wWh`vWo0U*P"
)
_IQ2_S = (
    "c-n1JOKt@r42!agI0c#&;*=39#3>LflvCCTO#7-9jpk=;Y=fB%TefG%OIlXuE_Fz<Ougf=%xu>+l3Bq8hyjg~lMrunmZ<Wy`~YGiEi#3On5v"
    "Bd<vmKZSi%aW(psKWGWlAsphF>8rUC+;ZDfa(=s@_F#i0yss$-8fvv#Vf@jNV{kuiVLgA~66J1A2@4RVJKUxH}IH-$JpaZ^g})pmKjjd>lmo"
    "jtPqGOJ!xqXVV(I)s3f1HneH&<4|id_Zsqi~d9|fZw$~1nHWO$bgs-@JBFei6qb36Asxo<#s4;BRhd~d<sfnbhG0<$t^)oE$@gK%zO1xyELV"
    "B%s1k`FAKZeJ@WjCtPZ6s4%XC=!ChZ<C{I5t%jB|RQ$q0^0H^%ZVVCdNfJ9HPfzZdmWSrg_I({bPgptf%^rJMcpz`hTS7u<>s9rVvW-WSa`T"
    "|j+oGk"
)
_IQ3_XXS = (
    "c-l=-K?=h#3{ye}VW$qZd!FLL9+1HvWO^EVh1sdkoaHp#R7#szmgHo6m{j1}>~2z^o7e*jro|>W6f;suxGq5ThwwrH-tdy3S=*8VCKknJ;ww"
    "~xN=C-Lt2kc1f`n?I#<sN&{qc;xi`rsIog^>xCi>0vO72GEj+P?`#G30*;dkafo0(MD70~26E5oy)Fh-PS2J_iYxE!Gh>5A3e2Aw8l#Lz*UZ"
    "2xyz&!sE!Xy7=t?heopubnm$;UMyR4j1Wf!f;*xLWT6+u!rw*Hy!tqyDZ17JdzPtf@!~_J7yrh&WtZi"
)
_IQ3_S = (
    "c-k#dK}rKb5Ud?m7(7iN59ovqtiR~U2pdlmS^v`sIn3TR;sZue5Z@6$Amj-`@D=vV+J}a&>aMEU{rNq)_mDQ1)6rXa`g-zl6)-xV9&D<-%sL"
    "tw(&E+K!8jAZAn=FIh`{BX?s3iZ9eL!0y{saQwa{i<M_rV8i?Gza!ZNf5Tx$=B>&%}&x2aFnb2>I1DZfG3@eJJ?w}Hf9jj>U<u}qaX$V(Q{%"
    "bJZi0qBwX8+P2=0D&xpG^*kpx3aC_+^woo1gDy;frCMb5s>PfCelExhl@Z5=M_J&lZwQK<TIaOt1Nd_t_Z4Nkqr(Irw~QLK*sjOloy2EUU#s"
    "N3YKfvLC9pG+yhGG#kO><KBF1{I~{B$E!8AqIlE}-BNQAl`R33C|JNFjj93D(#a!oZudm_a(c~OHe<Yb)Y4R?AVbTWv01QA~hX"
)

_THREE = (8, 25, 43)

CODEBOOKS: Mapping[CodebookStorage, Codebook] = {
    "iq2_xxs": Codebook(
        _THREE,
        8,
        _IQ2_XXS,
        66,
        index=BitField(2, 8, 8, per_word=4),
        signs=BitField(2, 8, 7, per_word=4, first=32),
        scales=BitField(2, 8, 4, first=60),
        groups=8,
        unit=1 / 8,
    ),
    "iq2_xs": Codebook(
        _THREE,
        8,
        _IQ2_XS,
        74,
        index=BitField(2, 2, 9),
        signs=BitField(2, 2, 7, first=9),
        scales=BitField(66, 1, 4, per_word=2),
        groups=16,
        unit=1 / 8,
    ),
    "iq2_s": Codebook(
        _THREE,
        8,
        _IQ2_S,
        82,
        index=BitField(2, 1, 8),
        signs=BitField(34, 1, 8),
        scales=BitField(74, 1, 4, per_word=2),
        groups=16,
        unit=1 / 8,
        high=BitField(66, 1, 2, per_word=4),
    ),
    "iq3_xxs": Codebook(
        (4, 12, 20, 28, 36, 44, 52, 62),
        4,
        _IQ3_XXS,
        98,
        index=BitField(2, 1, 8),
        signs=BitField(66, 4, 7, per_word=4),
        scales=BitField(66, 4, 4, first=28),
        groups=8,
        unit=1 / 4,
    ),
    "iq3_s": Codebook(
        (1, 3, 5, 7, 9, 11, 13, 15),
        4,
        _IQ3_S,
        110,
        index=BitField(2, 1, 8),
        signs=BitField(74, 1, 8),
        scales=BitField(106, 1, 4, per_word=2),
        groups=8,
        unit=1.0,
        high=BitField(66, 1, 1, per_word=8),
    ),
}
"""Types of blocks by the name of the weight format that stores them."""
