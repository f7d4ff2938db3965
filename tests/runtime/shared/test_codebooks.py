"""Blocks with a codebook stand for what the package ``gguf`` makes of them, bit for bit."""

from __future__ import annotations

import itertools
import tracemalloc

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import quants

from enginewright.runtime.bundle.weights import TensorEntry, expand, pack_blocks, stored_bytes, unpack, unpack_blocks
from enginewright.runtime.shared.codebooks import CODEBOOKS, VALUES, Codebook, CodebookStorage, _vectors
from enginewright.runtime.shared.panel_layouts import Layout
from enginewright.runtime.shared.weight_formats import FORMATS

codebooks = pytest.mark.parametrize("name", CODEBOOKS)


def random_blocks(codebook: Codebook, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random blocks [*shape, bytes] with finite scales, 0 and the largest and the smallest float16 among them."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape, codebook.block_bytes), dtype=np.uint8)
    scales = rng.normal(size=shape).astype("<f2")
    scales.reshape(-1)[:5] = (0.0, -0.0, 65504.0, -65504.0, 2.0**-24)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks


def dequantized(name: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The package's floats of blocks [.., bytes]: [.., 256]."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    floats: npt.NDArray[np.float32] = gguf.dequantize(blocks.reshape(1, -1), kind)
    return floats.reshape(*blocks.shape[:-1], VALUES)


@codebooks
def test_every_vector_is_the_packages(name: CodebookStorage) -> None:
    theirs = getattr(quants, name.upper())
    theirs.init_grid()
    np.testing.assert_array_equal(_vectors(CODEBOOKS[name]), theirs.grid.reshape(theirs.grid_shape))
    assert set(np.unique(theirs.grid)) == set(CODEBOOKS[name].magnitudes)


@codebooks
@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (2, 300, 2)])
def test_random_blocks_are_what_the_package_makes_of_them(name: CodebookStorage, shape: tuple[int, ...]) -> None:
    """Also where they are more than one piece, and no whole number of them."""
    blocks = random_blocks(CODEBOOKS[name], shape)
    assert CODEBOOKS[name].expand(blocks).tobytes() == dequantized(name, blocks).tobytes()


def test_every_index_every_sign_and_every_scale_of_iq3_xxs() -> None:
    index, signs, scale = np.meshgrid(np.arange(256), np.arange(128), np.arange(16), indexing="ij")
    count = index.size // 8
    blocks = np.zeros((count, 98), np.uint8)
    blocks[:, :2] = np.float16(0.37).tobytes()[0], np.float16(0.37).tobytes()[1]
    blocks[:, 2:66] = np.tile(index.reshape(count, 8), 8)
    # The last axis counts scales, so 8 neighbours have one index and one pattern of signs, and a block half the scales.
    words = signs.reshape(count, 8).astype(np.uint32)
    words = words | words << 7 | words << 14 | words << 21 | scale.reshape(count, 8).astype(np.uint32) << 28
    blocks[:, 66:] = words.astype("<u4").view(np.uint8)
    ours = CODEBOOKS["iq3_xxs"].expand(blocks)
    assert ours.tobytes() == dequantized("iq3_xxs", blocks).tobytes()
    vectors = ours.reshape(-1, 8, 8)[:, 0] / np.abs(ours.reshape(-1, 8, 8)[:, 0]).min(-1, keepdims=True)
    assert len({tuple(v) for v in np.sign(vectors)}) == 128


@codebooks
def test_rows_are_packed_and_read_back(name: CodebookStorage) -> None:
    blocks = random_blocks(CODEBOOKS[name], (33, 3))
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    values = np.ascontiguousarray(blocks[..., 2:]).reshape(33, -1).view(np.int8)
    packed = pack_blocks(values, scales, name)
    assert packed.tobytes() == blocks.tobytes()
    floats = unpack_blocks(packed.reshape(-1), (33, 3 * VALUES), name)
    assert floats.tobytes() == dequantized(name, blocks).tobytes()


def test_a_format_has_the_bits_that_its_blocks_say() -> None:
    bits = {name: 8 * book.block_bytes / VALUES for name, book in CODEBOOKS.items()}
    assert bits == {"iq2_xxs": 2.0625, "iq2_xs": 2.3125, "iq2_s": 2.5625, "iq3_xxs": 3.0625, "iq3_s": 3.4375}
    for name, book in CODEBOOKS.items():
        assert FORMATS[name].codebook is book
        assert len(book.magnitudes) ** book.length >= len(_vectors(book))
        ends = [f.start + f.word for f in (book.index, book.signs, book.scales)]
        assert max(itertools.chain(ends)) <= book.block_bytes


@pytest.mark.parametrize(
    ("shape", "layout"), [((4096, 512), "panel32"), ((4096, 512), "rows"), ((3, 1000, 256), "panel32")]
)
def test_a_weight_is_expanded_in_its_layout_without_a_second_copy(shape: tuple[int, ...], layout: Layout) -> None:
    blocks = random_blocks(CODEBOOKS["iq3_xxs"], (*shape[:-1], shape[-1] // VALUES))
    entry = TensorEntry(
        blob=0, offset=0, bytes=blocks.size, dtype="f32", shape=shape, layout=layout, stored_as="iq3_xxs"
    )
    assert blocks.size == stored_bytes(shape, layout, "f32", "iq3_xxs")
    into = np.empty(stored_bytes(shape, layout, "f32"), np.uint8)
    expand(blocks.reshape(-1), entry, into)  # makes the tables, too
    floats = dequantized("iq3_xxs", blocks).reshape(shape)
    assert unpack(into.view(np.float32).reshape(entry.stored_shape), shape, layout).tobytes() == floats.tobytes()
    tracemalloc.start()
    try:
        expand(blocks.reshape(-1), entry, into)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
