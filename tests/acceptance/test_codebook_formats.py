"""A GGUF file with blocks of a codebook keeps them in a bundle, which expands them when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner

import enginewright as ew
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import WeightsIndex, unpack
from enginewright.runtime.shared.codebooks import CODEBOOKS, VALUES
from enginewright.runtime.shared.errors import BundleError, PassError, SourceError
from enginewright.runtime.shared.lowered_program import WeightUse
from tests.optimizer.capture.gguf.test_model import Q, permuted, write

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
TYPES = [Q[name.upper()] for name in CODEBOOKS]


def random_rows(kind: Q, shape: tuple[int, ...]) -> npt.NDArray[np.uint8] | None:
    """Random blocks for the rows of a tensor, with weights of an ordinary size; None for other types."""
    if kind not in TYPES:
        return None
    book = CODEBOOKS[kind.name.lower()]
    rng = np.random.default_rng(shape[0] + shape[1])
    blocks = rng.integers(0, 256, (shape[0], shape[1] // VALUES, book.block_bytes), dtype=np.uint8)
    # The root mean square of a weight is near 16 magnitudes of the largest.
    scale = 0.04 / (16 * book.unit * max(book.magnitudes) / 2)
    scales = (scale * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype("<f2")
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def kind_of(kind: Q) -> Callable[[str], Q]:
    """All matrices in blocks of one type, but for the table and the head, which have float16."""
    return lambda name: kind if name.startswith("blk.") else Q.F16


def floats_of(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The package's floats of a file's matrices, rows of q and k in the model's order."""
    values = {}
    for tensor in gguf.GGUFReader(str(path)).tensors:
        if len(tensor.shape) == 2:
            rows = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in tensor.shape[::-1]))
            heads = {"attn_q": 4, "attn_k": 2}.get(tensor.name.split(".")[-2])
            values[tensor.name] = rows if heads is None else back(rows, heads)
    return values


def back(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The reverse of ``permuted``."""
    order = np.argsort(permuted(np.arange(len(rows))[:, None], heads)[:, 0])
    return rows[order]


def check_floats(bundle: Bundle, path: Path, storage: str) -> int:
    """Compares every weight that is stored as a format with the file's, bit for bit; gives how many there are."""
    floats, compared = floats_of(path), 0
    for name, entry in bundle.index.tensors.items():
        if entry.stored_as != storage:
            continue
        got = unpack(np.array(bundle.weight(name)), entry.shape, entry.layout, entry.dtype)
        want = np.concatenate([floats[part.source][part.rows[0] : part.rows[1]] for part in entry.parts])
        assert got.tobytes() == want.tobytes(), name
        assert entry.bytes == got.size // VALUES * CODEBOOKS[entry.stored_as].block_bytes
        compared += 1
    return compared


@pytest.fixture(scope="module")
def file(tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("iq3") / "tiny.gguf"
    write(tiny_model("Llama", **SIZES), path, kind_of(Q.IQ3_XXS), blocks=random_rows)
    return path


@pytest.fixture(scope="module")
def bundle(file: Path) -> Path:
    export(file, file.with_suffix(".bundle"), targets=("cpu", "onnx"))
    return file.with_suffix(".bundle")


def test_a_bundle_has_a_files_blocks_and_serves_them(file: Path, bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert json.loads((bundle / "weights" / "index.json").read_text())["format_version"] == 8
    assert check_floats(opened, file, "iq3_xxs") == 4  # q with k and v, o, gate with up, down
    greedy = ew.SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(3, 40)), [9]]
    for target in ("cpu", "onnx"):
        with ew.LLM(bundle, target=target) as llm:
            together = [o.token_ids for o in llm.generate(prompts, greedy)]
            assert together == [llm.generate([p], greedy)[0].token_ids for p in prompts]


@pytest.mark.matrix
def test_a_file_of_several_types_keeps_each(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """A layer of each type, and a table and a head of IQ3_S, as llama.cpp's mixtures have them."""

    def kind(name: str) -> Q:
        return TYPES[int(name.split(".")[1])] if name.startswith("blk.") else Q.IQ3_S

    model = tiny_model("Llama", **SIZES | {"intermediate_size": 256, "num_hidden_layers": len(TYPES)})
    path = write(model, tmp_path / "tiny.gguf", kind, blocks=random_rows)
    report = export(path, tmp_path / "tiny.bundle", targets=("cpu",))
    assert report.quantization is not None and report.quantization.kept == report.quantization.values > 0
    bundle = Bundle.open(tmp_path / "tiny.bundle")
    for name in CODEBOOKS:
        assert check_floats(bundle, path, name) == (4 if name != "iq3_s" else 6)
    output = CliRunner().invoke(app, ["inspect", str(tmp_path / "tiny.bundle"), "--json"]).stdout
    assert json.loads(output)["weight_bytes_by_type"].keys() >= set(CODEBOOKS)


def test_a_rank_reads_its_rows_alone(file: Path, bundle: Path) -> None:
    """Rows that begin with a panel are expanded by themselves, in the layout that the whole weight has."""
    opened = Bundle.open(bundle)
    for name, entry in opened.index.tensors.items():
        if entry.stored_as is None:
            continue
        whole = unpack(np.array(opened.weight(name)), entry.shape, entry.layout, entry.dtype)
        for first, rows in ((0, 64), (96, 40), (entry.shape[0] - 32, 32)):
            use = WeightUse(
                name="x", dtype="f32", shape=(rows, entry.shape[1]), layout=entry.layout, source=name, first=first
            )
            for load in ("map", "read"):
                stored = opened.part(use, load).view(np.float32)  # type: ignore[arg-type]
                panels = stored.reshape(-(-rows // 32), entry.shape[1], 32)
                part = unpack(panels, use.shape, entry.layout, "f32")
                assert part.tobytes() == whole[first : first + rows].tobytes()


def damaged(file: Path, tmp_path: Path, change: Callable[[bytearray, int], bytearray]) -> Path:
    """A copy of the file, changed by a function of its bytes and the place of blk.0.ffn_down.weight's."""
    (tensor,) = (t for t in gguf.GGUFReader(str(file)).tensors if t.name == "blk.0.ffn_down.weight")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(bytearray(file.read_bytes()), int(tensor.data_offset)))
    return path


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_scale_that_is_no_number_is_named(file: Path, tmp_path: Path, scale: float) -> None:
    def change(data: bytearray, at: int) -> bytearray:
        data[at + 98 : at + 100] = np.float16(scale).tobytes()
        return data

    path = damaged(file, tmp_path, change)
    with pytest.raises(SourceError, match=r"blk\.0\.ffn_down\.weight.*NaN") as caught:
        export(path, tmp_path / "x.bundle", targets=("cpu",))
    assert path.name in str(caught.value)
    assert not (tmp_path / "x.bundle").exists()


def test_a_file_that_is_cut_off_or_has_odd_rows_is_named(file: Path, tmp_path: Path) -> None:
    def cut(data: bytearray, at: int) -> bytearray:
        return data[: at + 980]

    with pytest.raises(SourceError, match=r"damaged\.gguf.*tensor blk\.0\.ffn_down\.weight"):
        export(damaged(file, tmp_path, cut), tmp_path / "x.bundle", targets=("cpu",))

    def narrow(data: bytearray, at: int) -> bytearray:
        name = b"blk.0.ffn_down.weight"
        start = data.index(name) + len(name) + 4
        data[start : start + 8] = (384).to_bytes(8, "little")
        return data

    with pytest.raises(SourceError, match=r"damaged\.gguf: tensor blk\.0\.ffn_down\.weight has rows of 384.*256"):
        export(damaged(file, tmp_path, narrow), tmp_path / "x.bundle", targets=("cpu",))


def test_an_index_that_lies_is_refused(bundle: Path) -> None:
    text = (bundle / "weights" / "index.json").read_text()
    tensors = json.loads(text)["tensors"]
    name = next(n for n, t in tensors.items() if t.get("stored_as") == "iq3_xxs" and "down_proj" in n)
    for field, value, message in (
        ("bytes", tensors[name]["bytes"] - 98, "bytes is"),
        ("shape", [256, 500], "iq3_xxs needs rows of a multiple of 256, shape is"),
        ("stored_as", "iq3_xss", "stored_as"),
        ("stored_as", "iq3_s", "bytes is"),
    ):
        changed = json.loads(text)
        changed["tensors"][name][field] = value
        with pytest.raises(BundleError, match=message) as caught:
            WeightsIndex.from_json(json.dumps(changed), source="a/index.json")
        assert f"a/index.json: tensors.{name}" in str(caught.value)


def test_nothing_is_rounded_to_a_codebook(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    iq3 = WeightFormat(storage="iq3_xxs", group_size=256)
    recipe = Recipe(name="x", targets=("cpu",), weights=WeightFormats(default=iq3), budget=BudgetSection(max_kl=100.0))
    with pytest.raises(PassError, match=r"proj.*storage iq3_xxs, which its source doesn't have"):
        export(tiny_model("Llama", **SIZES), tmp_path / "x.bundle", recipe=recipe)
