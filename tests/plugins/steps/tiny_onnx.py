"""A tiny decoder in the linear form, made of ONNX nodes with random weights; the same in numpy; and a bundle of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.steps.linear_io import LinearCacheGroup, LinearIo, cache_names
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, TargetManifest
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.contracts import CacheGroup, ModelInfo

V, H, NQ, NKV, D, DV, WINDOW, CONTEXT = 50, 24, 4, 2, 8, 6, 5, 40
WINDOWS = (0, WINDOW)  # of the two layers
GROUPS = (
    CacheGroup("full", (0,), NKV, D, DV),
    CacheGroup("window", (1,), NKV, D, DV, window=WINDOW),
)

Array = npt.NDArray[np.float32]


def weights(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    arrays = {"embed": some(V, H) * np.float32(5), "head": some(H, V)}
    for layer in range(len(WINDOWS)):
        sizes = {"q": (H, NQ * D), "k": (H, NKV * D), "v": (H, NKV * DV), "o": (NQ * DV, H)}
        arrays |= {f"{name}{layer}": some(*shape) * np.float32(2) for name, shape in sizes.items()}
    return arrays


def tables() -> tuple[Array, Array]:
    angles = np.arange(CONTEXT)[:, None] / 100.0 ** (np.arange(0, D, 2) / D)  # [CONTEXT, D/2]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def make_model(seed: int = 0) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []
    constants = {name: numpy_helper.from_array(value, name) for name, value in weights(seed).items()}
    for name, value in zip(("cos", "sin"), tables(), strict=True):
        constants[name] = numpy_helper.from_array(value, name)

    def shape(name: str, *sizes: int) -> str:
        constants[name] = numpy_helper.from_array(np.array(sizes, np.int64), name)
        return name

    def node(op: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def value(name: str, kind: int, *sizes: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, sizes)

    inputs = [value("input_ids", TensorProto.INT64, "B", "S"), value("position_ids", TensorProto.INT64, "B", "S")]
    inputs += [value("write_index", TensorProto.INT64, "B"), value("rows", TensorProto.INT64, "R")]
    inputs += [value(m, TensorProto.BOOL, "B", 1, "S", "C") for m in ("mask", f"mask_w{WINDOW}")]
    outputs = [value("logits", TensorProto.FLOAT, "R", V)]
    batch_and_length = node("Shape", ["input_ids"], "bs")
    x = node("Gather", ["embed", "input_ids"], "x")  # [B, S, H]
    for i, window in enumerate(WINDOWS):
        heads = {}
        for what, count, size in (("q", NQ, D), ("k", NKV, D), ("v", NKV, DV)):
            y = node("MatMul", [x, f"{what}{i}"], f"{what}{i}y")
            to = node("Concat", [batch_and_length, shape(f"{what}{i}s", count, size)], f"{what}{i}t", axis=0)
            y = node("Transpose", [node("Reshape", [y, to], f"{what}{i}r")], f"{what}{i}h", perm=[0, 2, 1, 3])
            if what != "v":
                y = node("RotaryEmbedding", [y, "cos", "sin", "position_ids"], f"{what}{i}rope")
            heads[what] = y
        for what, (past, present), size in zip("kv", cache_names(i), (D, DV), strict=True):
            sizes = ("B", NKV, "C", size)
            inputs.append(value(past, TensorProto.FLOAT, *sizes))
            outputs.append(value(present, TensorProto.FLOAT, *sizes))
            node("TensorScatter", [past, heads[what], "write_index"], present, axis=2, mode="linear")
        seen = f"mask_w{window}" if window else "mask"
        y = node("Attention", [heads["q"], f"present_key_{i}", f"present_value_{i}", seen], f"a{i}")
        y = node("Reshape", [node("Transpose", [y], f"a{i}t", perm=[0, 2, 1, 3]), shape(f"a{i}s", 0, 0, -1)], f"a{i}r")
        x = node("Add", [x, node("MatMul", [y, f"o{i}"], f"o{i}y")], f"x{i}")
    flat = node("Reshape", [x, shape("flat", -1, H)], "tokens")
    node("MatMul", [node("Gather", [flat, "rows"], "wanted"), "head"], "logits")
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, list(constants.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    onnx.checker.check_model(model, full_check=True)
    return model


def reference(ids: list[int], seed: int = 0) -> Array:
    """Logits after every token of one sequence: [S] -> [S, V]."""
    w = weights(seed)
    cos, sin = (t[: len(ids), None] for t in tables())  # [S, 1, D/2]
    x = w["embed"][ids]  # [S, H]
    for i, window in enumerate(WINDOWS):
        q, k = (_rotated((x @ w[f"{n}{i}"]).reshape(len(ids), -1, D), cos, sin) for n in "qk")
        v = (x @ w[f"v{i}"]).reshape(len(ids), NKV, DV)
        at, behind = np.arange(len(ids)), np.arange(len(ids))[:, None]
        seen = (at <= behind) & (at > behind - (window or len(ids)))
        out = np.empty((len(ids), NQ, DV), np.float32)
        for head in range(NQ):
            of = head * NKV // NQ
            scores = np.where(seen, q[:, head] @ k[:, of].T / np.sqrt(D), -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = shares / shares.sum(-1, keepdims=True) @ v[:, of]
        x = x + out.reshape(len(ids), -1) @ w[f"o{i}"]
    logits: Array = x @ w["head"]
    return logits


def greedy(prompt: list[int], tokens: int, seed: int = 0) -> list[int]:
    """The greedy continuation of a prompt."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(reference(ids, seed)[-1].argmax()))
    return ids[len(prompt) :]


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def write_bundle(path: Path, *, onnxruntime: str = "1.25.0", io: bool = True, model: bytes | None = None) -> Path:
    """A bundle with nothing but the target onnx."""
    info = ModelInfo("tiny", "TinyForCausalLM", V, CONTEXT)
    section = LinearIo(
        opset=24,
        onnxruntime=onnxruntime,
        cache_groups=tuple(LinearCacheGroup.from_group(group) for group in GROUPS),
        summed_products=H * 8,
    )
    manifest = Manifest(
        model=ModelSection.from_info(info),
        source=SourceSection(kind="module", name="tiny"),
        targets=(),
        recipe={"name": "f32"},
    )
    with BundleWriter(path) as writer:
        for name, data in TokenizerFiles().to_files().items():
            writer.write_bytes(name, data)
        writer.write_bytes("model.onnx", make_model().SerializeToString() if model is None else model)
        writer.commit(manifest, {"onnx": TargetManifest(sections={"io": section} if io else {})})
    return path
