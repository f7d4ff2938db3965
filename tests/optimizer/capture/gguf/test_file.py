"""Opening GGUF files: damaged ones, those in parts, and those that aren't models."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from enginewright.optimizer.capture import capture
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.capture.gguf.header import all_parts, has_kept_blocks
from enginewright.optimizer.capture.gguf.model import read_config
from enginewright.optimizer.capture.hub import fetch
from enginewright.runtime.bundle.hub_id import HubId
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from tests.optimizer.hub_server import Hub, Repository

from .gguf_models import CASES, Array, add_key, build, tensors_of, write_model

Damage = Callable[[bytearray], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound file of a Llama."""
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    general = {"general.alignment": 32, "tokenizer.ggml.tokens": ["a", "b"], "general.tags": ["x"]}
    return write_model(path, "llama", build(CASES["llama"]), general=general).read_bytes()


def _after(data: bytes, name: str, skip: int = 0) -> int:
    """The place after a name in the header, and ``skip`` bytes more."""
    return data.index(name.encode()) + len(name) + skip


def _put(name: str, skip: int, layout: str, value: int) -> Damage:
    def damage(data: bytearray) -> None:
        struct.pack_into(layout, data, _after(data, name, skip), value)

    return damage


def _renamed(old: bytes, new: bytes) -> Damage:
    def damage(data: bytearray) -> None:
        at = data.index(old)
        data[at : at + len(old)] = new

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "2^63 tensors": (lambda d: struct.pack_into("<Q", d, 8, 1 << 63), "should have"),
    "2^63 keys": (lambda d: struct.pack_into("<Q", d, 16, 1 << 63), "should have"),
    "2^63 items": (_put("tokenizer.ggml.tokens", 8, "<Q", 1 << 63), r"should have .*key tokenizer\.ggml\.tokens"),
    "2^64 - 1 items": (_put("tokenizer.ggml.tokens", 8, "<Q", (1 << 64) - 1), r"key tokenizer\.ggml\.tokens"),
    "a long text": (_put("general.name", 4, "<Q", 1 << 62), r"should have .*key general\.name"),
    "a key twice": (
        _renamed(b"llama.attention.key_length", b"llama.attention.head_count"),
        r"head_count: it is there twice",
    ),
    "a tensor twice": (_renamed(b"blk.1.attn_k", b"blk.0.attn_k"), r"tensor blk\.0\.attn_k\.weight: it is there twice"),
    "alignment 0": (_put("general.alignment", 4, "<I", 0), r"key general\.alignment: it is 0"),
    "alignment 24": (_put("general.alignment", 4, "<I", 24), r"key general\.alignment: it is 24"),
    "alignment of text": (_put("general.alignment", 0, "<I", 99), r"key general\.alignment: .* type 99"),
    "arrays of arrays": (_put("general.tags", 4, "<I", 9), r"key general\.tags: .*array of arrays"),
    "an unknown type of items": (_put("general.tags", 4, "<I", 77), r"key general\.tags: .*type 77"),
    "no UTF-8 in a value": (_renamed(b"tiny", b"ti\xffy"), r"key general\.name: b'ti\\xffy' isn't UTF-8"),
    "no UTF-8 in a name": (_renamed(b"llama.vocab_size", b"llama.voca\xff_size"), "isn't UTF-8"),
    "an offset after the end": (_put("blk.1.attn_k.weight", 24, "<Q", 1 << 40), r"tensor blk\.1\.attn_k\.weight"),
    "an odd offset": (_put("blk.1.attn_k.weight", 24, "<Q", 33), r"tensor blk\.1\.attn_k\.weight: its offset is 33"),
    "another tensor's offset": (_put("blk.1.attn_k.weight", 24, "<Q", 32), "overlaps"),
    "five dimensions": (_put("blk.1.attn_k.weight", 0, "<I", 5), r"tensor blk\.1\.attn_k\.weight: it has 5 dimensions"),
    "a dimension of 0": (_put("blk.1.attn_k.weight", 4, "<Q", 0), r"blk\.1\.attn_k\.weight: .*a dimension is 0"),
    "2^63 columns": (_put("blk.1.attn_k.weight", 4, "<Q", 1 << 63), r"tensor blk\.1\.attn_k\.weight"),
    "an unknown block type": (_put("blk.1.attn_k.weight", 20, "<I", 99), "blocks of type 99"),
    "version 1": (lambda d: struct.pack_into("<I", d, 4, 1), "version 1"),
    "big-endian": (lambda d: struct.pack_into(">I", d, 4, 3), "big-endian"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, whole: bytes, tmp_path: Path) -> None:
    data, path = bytearray(whole), tmp_path / "bad.gguf"
    change, message = DAMAGES[damage]
    change(data)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message) as caught:
        open_gguf(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_file_cut_anywhere_is_damaged(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in (*range(0, 3000, 37), len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError, match=r"cut\.gguf"):
            open_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", "two", r"key llama\.block_count is 'two', and no integer"),
        ("block_count", 2.0, r"key llama\.block_count is 2\.0, and no integer"),
        ("block_count", ("int32", -1), r"key llama\.block_count is -1, and not in"),
        ("block_count", True, r"key llama\.block_count is True, and no integer"),
        ("block_count", [2], r"key llama\.block_count is an array of 1, and no integer"),
        ("block_count", None, r"key llama\.block_count is missing"),
        ("context_length", None, r"key llama\.context_length is missing"),
        ("attention.layer_norm_rms_epsilon", None, r"key llama\.attention\.layer_norm_rms_epsilon is missing"),
        ("attention.layer_norm_rms_epsilon", 1, r"layer_norm_rms_epsilon is 1, and no floating-point number"),
        ("attention.layer_norm_rms_epsilon", float("nan"), r"layer_norm_rms_epsilon is nan, and not finite"),
        ("attention.head_count", [4, 4, 4], r"key llama\.attention\.head_count is an array of 3, and not one"),
        ("rope.freq_base", "10000", r"key llama\.rope\.freq_base is '10000', and no floating-point number"),
        ("rope.scaling.type", 3, r"key llama\.rope\.scaling\.type is 3, and no text"),
        ("block_count", 1000, r"llama\.block_count is 1000, and there are"),
    ],
)
def test_a_key_that_is_missing_or_of_another_type_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", build(CASES["llama"]), keys={key: value})
    with pytest.raises(SourceError, match=message) as caught:
        read_config(open_gguf(path))
    assert str(path) in caught.value.message


def test_a_token_that_is_no_utf_8_names_its_key(whole: bytes, tmp_path: Path) -> None:
    data, path = bytearray(whole), tmp_path / "bad.gguf"
    data[_after(data, "tokenizer.ggml.tokens", 16 + 8)] = 0xFF
    path.write_bytes(data)
    file = open_gguf(path)
    with pytest.raises(SourceError, match=r"key tokenizer\.ggml\.tokens: b'\\xff' isn't UTF-8"):
        file.array("tokenizer.ggml.tokens")


def write_part(
    path: Path, number: int, count: int, tensors: dict[str, Array], keys: dict[str, Any], total: int
) -> Path:
    """Writes one part as llama-gguf-split does: the first has all keys, each its tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in keys.items():
        add_key(writer, key, value)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A Llama in three files."""
    model = build(CASES["llama"])
    one = open_gguf(write_model(tmp_path / "one.gguf", "llama", model))
    keys = {key: value for key, value in one.metadata.items() if key != "general.architecture"}
    tensors = list(tensors_of("llama", model).items())
    return [
        write_part(
            tmp_path / f"big-{i + 1:05d}-of-00003.gguf", i, 3, dict(tensors[i::3]), keys if i == 0 else {}, len(tensors)
        )
        for i in range(3)
    ]


def test_parts_are_joined(parts: list[Path], tmp_path: Path) -> None:
    joined, one = open_gguf(parts[0]), open_gguf(tmp_path / "one.gguf")
    assert joined.parts == tuple(parts)
    assert joined.tensors.keys() == one.tensors.keys()
    for name, tensor in joined.tensors.items():
        assert tensor.data.tobytes() == one.tensors[name].data.tobytes(), name
    assert capture(parts[0]).model_info.name == "big"


@pytest.mark.parametrize("name", ["big-00003-of-00003.gguf", None])
def test_all_parts_come_from_the_hub(name: str | None, parts: list[Path], hub: Hub) -> None:
    hub.repositories["some-org/big-GGUF"] = Repository.of({part.name: part.read_bytes() for part in parts})
    first = fetch(HubId("some-org/big-GGUF", None, name), lambda event: None)
    assert set(hub.served) == {part.name for part in parts}
    fetched, local = open_gguf(first), open_gguf(parts[0])
    assert {name: tensor.data.tobytes() for name, tensor in fetched.tensors.items()} == {
        name: tensor.data.tobytes() for name, tensor in local.tensors.items()
    }


def test_blocks_are_looked_for_in_all_parts(tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / f"big-{number + 1:05d}-of-00002.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        if number:
            writer.add_tensor("w", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert has_kept_blocks(tmp_path / "big-00001-of-00002.gguf")
    assert [part.name for part in all_parts(tmp_path / "big-00001-of-00002.gguf")][1:] == [path.name]
    path.unlink()
    assert not has_kept_blocks(tmp_path / "big-00001-of-00002.gguf")


def test_a_part_that_is_not_the_first_names_the_first(parts: list[Path]) -> None:
    with pytest.raises(SourceError, match="part 2 of a model in 3 files") as caught:
        open_gguf(parts[1])
    assert parts[0].name in str(caught.value.hint)


def test_parts_that_are_missing_or_do_not_belong_together(parts: list[Path], tmp_path: Path) -> None:
    content = parts[2].read_bytes()
    parts[2].unlink()
    with pytest.raises(SourceError, match=f"{parts[2].name} isn't next to it"):
        open_gguf(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(SourceError, match=r"of-00003\.gguf: key split\.no is 1, and should be 2"):
        open_gguf(parts[0])
    write_part(parts[2], 2, 3, {"blk.0.attn_norm.weight": np.ones(64)}, {}, 1)
    with pytest.raises(SourceError, match=r"blk\.0\.attn_norm\.weight is in|tensors.count is"):
        open_gguf(parts[0])
    parts[2].write_bytes(content)
    other = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(SourceError, match=r"split\.count is 3, and the file isn't named NAME-00001-of-00003\.gguf"):
        open_gguf(other)


def _write(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Array]) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in keys.items():
        add_key(writer, key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONE = {"w": np.ones((2, 32))}


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "message"),
    [
        ("clip", {"general.type": "mmproj"}, ONE, "mmproj"),
        ("clip", {}, ONE, "mmproj"),
        ("llama", {"general.type": "mmproj"}, ONE, "mmproj"),
        ("llama", {"general.type": "adapter", "adapter.type": "lora"}, ONE, "LoRA adapter"),
        ("llama", {}, {"blk.0.attn_q.weight.lora_a": np.ones((2, 32))}, "LoRA adapter"),
        ("imatrix", {"general.type": "imatrix"}, ONE, "importance matrix"),
        ("controlvector", {"controlvector.layer_count": 2}, {"direction.1": np.ones(32)}, "control vector"),
        ("llama", {}, {"direction.1": np.ones(32)}, "control vector"),
        ("llama", {"tokenizer.ggml.model": "gpt2"}, {}, "vocabulary alone"),
        ("nomic-bert-moe", {}, ONE, "no class"),
        ("neo-bert", {}, ONE, "no class"),
        ("t5encoder", {}, ONE, "encoder of T5"),
        ("t5", {}, ONE, "encoder of T5"),
        ("dream", {}, ONE, "diffusion model"),
        ("llada", {}, ONE, "diffusion model"),
        ("wavtokenizer-dec", {}, ONE, "model of speech"),
        ("eagle3", {}, ONE, "draft model"),
        ("no-such", {}, ONE, "'no-such'"),
    ],
)
def test_files_that_are_no_decoders_are_named(
    architecture: str, keys: dict[str, Any], tensors: dict[str, Array], message: str, tmp_path: Path
) -> None:
    path = _write(tmp_path / "other.gguf", architecture, keys, tensors)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        capture(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
