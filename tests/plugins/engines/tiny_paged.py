"""The tiny decoder of tiny_onnx over caches in blocks, in numpy: as one engine, and as segments between kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from enginewright.plugins.gpu.choose_tiles import compile_layer
from enginewright.plugins.gpu.compile_ahead import CompiledKernel
from enginewright.plugins.gpu.cuda_driver import Argument
from enginewright.plugins.gpu.specs import AttentionShape, KernelSpec
from enginewright.plugins.steps.paged_section import cache_tensors
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.step_schema import BLOCK_TABLE, SLOTS, group_port
from tests.plugins.gpu.fake_driver import KERNELS, FakeDevice
from tests.plugins.steps import tiny_onnx as tiny

from .fake_tensorrt import Feeds, Model

BLOCK = 4
SCALE = tiny.D**-0.5
GROUPS = tuple(
    CacheGroup(g.name, g.layers, g.kv_heads, g.key_head_size, g.value_head_size, g.window, "f32", block_size=BLOCK)
    for g in tiny.GROUPS
)
F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


CODES = {"int8": np.dtype(np.int8), "e4m3": FP8, "fp8": FP8}
"""The codes by FORMAT of a kernel; a float cache has none."""
LARGEST = {"int8": 127, "float8_e4m3fn": 448}


def write(cache: np.ndarray, new: np.ndarray, slots: np.ndarray) -> None:
    """[P,K,..], [T,..], [T]"""
    flat = cache.reshape(-1, *cache.shape[2:])
    for token, slot in zip(new, slots.tolist(), strict=True):
        if slot >= 0:
            flat[slot] = token


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    table: np.ndarray,
    q_start: np.ndarray,
    kv_len: np.ndarray,
    window: int,
    scale: float,
) -> np.ndarray:
    """[T,Nq,D] over caches [P,K,Nkv,D] -> [T,Nq,Dv]; NaN for tokens that no request has."""
    out = np.full((*q.shape[:2], v.shape[3]), np.nan, np.float32)
    for b in range(len(kv_len)):
        first, last = int(q_start[b]), int(q_start[b + 1])
        for t in range(first, last):
            place = int(kv_len[b]) - (last - t)
            seen = np.arange(max(0, place + 1 - window) if window else 0, place + 1)
            blocks, size = table[b, seen // k.shape[1]], k.shape[1]
            assert (blocks >= 0).all()
            keys, values = k[blocks, seen % size], v[blocks, seen % size]  # [n, Nkv, D]
            for head in range(q.shape[1]):
                of = head * k.shape[2] // q.shape[1]
                scores = keys[:, of] @ q[t, head] * np.float32(scale)
                shares = np.exp(scores - scores.max())
                out[t, head] = shares / shares.sum() @ values[:, of]
    return out


def _rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    cos, sin = (table[positions][:, None] for table in tiny.tables())  # [T, 1, D/2]
    half = tiny.D // 2
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def heads_of(x: np.ndarray, positions: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Sequence[np.ndarray]:
    tokens = len(x)
    rotated = [_rotated((x @ w).reshape(tokens, -1, tiny.D), positions) for w in (q, k)]
    return *rotated, (x @ v).reshape(tokens, tiny.NKV, tiny.DV)


def whole() -> Model:
    """One engine with attention inside: ``plugins.steps.paged_section``."""
    w = tiny.weights()

    def compute(feeds: Feeds) -> Feeds:
        positions = feeds["positions"]
        x, out = w["embed"][feeds["ids"]], {}
        for layer, group in enumerate(GROUPS):
            q, k, v = heads_of(x, positions, *(w[f"{n}{layer}"] for n in "qkv"))
            caches = []
            for tensor, new in zip(cache_tensors(group, layer), (k, v), strict=True):
                out[tensor.written] = feeds[tensor.name]
                write(out[tensor.written], new, feeds[group_port(SLOTS, group.name)])
                caches.append(out[tensor.written])
            table = feeds[group_port(BLOCK_TABLE, group.name)]
            y = attend(q, *caches, table, feeds["q_start"], feeds["kv_len"], group.window, SCALE)
            x = x + y.reshape(len(x), -1) @ w[f"o{layer}"]
        out["logits"] = (x @ w["head"])[feeds["rows"]].astype(np.float32)
        return out

    inputs = {"ids": ("INT32", ("T",)), "positions": ("INT32", ("T",)), "q_start": ("INT32", ("B + 1",))}
    inputs |= {"kv_len": ("INT32", ("B",)), "rows": ("INT32", ("R",))}
    outputs = {"logits": ("FLOAT", ("R", tiny.V))}
    for layer, group in enumerate(GROUPS):
        inputs |= {
            group_port(SLOTS, group.name): ("INT32", ("T",)),
            group_port(BLOCK_TABLE, group.name): ("INT32", ("B", "M")),
        }
        for tensor in cache_tensors(group, layer):
            inputs[tensor.name] = outputs[tensor.written] = ("FLOAT", ("P", BLOCK, *tensor.of_slot))
    return Model(inputs, outputs, compute)  # type: ignore[arg-type]


X = ("FLOAT", ("T", tiny.H))
A = ("FLOAT", ("T", tiny.NQ, tiny.DV))
QKV = {
    "q": ("FLOAT", ("T", tiny.NQ, tiny.D)),
    "k": ("FLOAT", ("T", tiny.NKV, tiny.D)),
    "v": ("FLOAT", ("T", tiny.NKV, tiny.DV)),
}
IDS, POSITIONS, ROWS = ("INT32", ("T",)), ("INT32", ("T",)), ("INT32", ("R",))
WEIGHTS = {name[:-1] if name[-1].isdigit() else name: value.shape for name, value in tiny.weights().items()}


def segments() -> dict[str, tuple[Model, tuple[str, ...]]]:
    """First, middle and last: what each computes, and the names of its weights among its inputs."""

    def of(*names: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: ("FLOAT", WEIGHTS[name]) for name in names}

    def first(feeds: Feeds) -> Feeds:
        x = feeds["embed"][feeds["ids"]]
        return {"x": x, **dict(zip("qkv", heads_of(x, feeds["positions"], *_qkv(feeds)), strict=True))}

    def middle(feeds: Feeds) -> Feeds:
        y = feeds["x"] + feeds["a"].reshape(len(feeds["x"]), -1) @ feeds["o"]
        return {"y": y, **dict(zip("qkv", heads_of(y, feeds["positions"], *_qkv(feeds)), strict=True))}

    def last(feeds: Feeds) -> Feeds:
        y = feeds["x"] + feeds["a"].reshape(len(feeds["x"]), -1) @ feeds["o"]
        return {"logits": (y @ feeds["head"])[feeds["rows"]]}

    weights = {f"w{n}": ("FLOAT", WEIGHTS[n]) for n in "qkv"}
    return {
        "first": (
            Model({"ids": IDS, "positions": POSITIONS, **weights, **of("embed")}, {"x": X, **QKV}, first),
            ("embed", *weights),
        ),
        "middle": (
            Model({"x": X, "a": A, "positions": POSITIONS, **weights, **of("o")}, {"y": X, **QKV}, middle),
            ("o", *weights),
        ),
        "last": (
            Model({"x": X, "a": A, "rows": ROWS, **of("o", "head")}, {"logits": ("FLOAT", ("R", tiny.V))}, last),
            ("o", "head"),
        ),
    }


def _qkv(feeds: Feeds) -> tuple[np.ndarray, ...]:
    return feeds["wq"], feeds["wk"], feeds["wv"]


# ---- kernels


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """In the place of Triton: code is what the launches below need to know."""
    code = json.dumps({"names": [name for name, _ in spec.arguments], "constants": dict(spec.constants)})
    return CompiledKernel(spec, spec.kernel, "", code.encode(), 64, "none")


def compiled(capability: int, group: CacheGroup) -> list[CompiledKernel]:
    """The kernels of a layer, in the order in which they are launched."""
    shape = AttentionShape(tiny.NQ, tiny.NKV, tiny.D, tiny.DV, BLOCK, "f32", "f32", SCALE, group.window)
    return list(compile_layer(shape, capability, split_keys=8, compiler=compile_kernel).all())


class _Launched:
    """A launch's arguments by name."""

    def __init__(self, device: FakeDevice, code: bytes, arguments: Sequence[Argument]) -> None:
        fields = json.loads(code)
        self.constants = fields["constants"]
        self.given = dict(zip(fields["names"], arguments, strict=True))
        self._device = device

    def view(self, name: str, *shape: int, dtype: np.dtype = F32) -> np.ndarray:
        return self._device.view(int(self.given[name]), dtype, shape)


def kv_write(device: FakeDevice, code: bytes, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
    run, tokens = _Launched(device, code, arguments), grid[0]
    slots, heads = run.view("slots", tokens, dtype=I32), run.constants["KV_HEADS"]
    for name, size in (("k", run.constants["HEAD_SIZE"]), ("v", run.constants["VALUE_SIZE"])):
        assert run.given[f"{name}_stride"] == heads * size
        assert run.given[f"{name}_cache"] == run.given[f"{name}_cache_before"]
        new, shape = run.view(name, tokens, heads, size), (1, int(run.given["capacity"]), heads)
        codes = CODES.get(run.constants["FORMAT"])
        if codes is not None:
            assert run.given[f"{name}_scales"] == run.given[f"{name}_scales_before"]
            largest = np.abs(new).max(-1)
            scales = np.where(largest > 0, largest / LARGEST[codes.name], 1).astype(np.float32)
            write(run.view(f"{name}_scales", *shape), scales, slots)
            new = new / scales[..., None]
            new = np.rint(new) if codes == np.int8 else new
        with np.errstate(invalid="ignore"):  # of tokens that no request has
            new = new.astype(codes or F32)
        write(run.view(f"{name}_cache", *shape, size, dtype=codes or F32), new, slots)


def paged_attention(device: FakeDevice, code: bytes, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
    """In parts, the first has everything and the others nothing."""
    run = _Launched(device, code, arguments)
    constants = run.constants
    requests, blocks = int(run.given["requests"]), int(run.given["blocks"])
    q_start, kv_len = run.view("q_start", requests + 1, dtype=I32), run.view("kv_len", requests, dtype=I32)
    table = run.view("block_table", requests, blocks, dtype=I32)
    tokens, pool = int(q_start[-1]), int(table.max()) + 1
    assert grid[0] >= sum(-(-int(n) // constants["QUERIES"]) for n in np.diff(q_start))
    shape, codes = (pool, constants["BLOCK_SIZE"], constants["KV_HEADS"]), CODES.get(constants["FORMAT"])
    caches = []
    for name, size in (("k", constants["HEAD_SIZE"]), ("v", constants["VALUE_SIZE"])):
        values = run.view(f"{name}_cache", *shape, size, dtype=codes or F32)
        if codes is not None:
            values = values.astype(np.float32) * run.view(f"{name}_scales", *shape)[..., None]
        caches.append(values)
    q = run.view("q", tokens, constants["Q_HEADS"], constants["HEAD_SIZE"])
    out = attend(q, *caches, table, q_start, kv_len, constants["WINDOW"], constants["SCALE"])
    if not constants["SPLIT_KEYS"]:
        run.view("out", *out.shape)[:] = out
        return
    shape = (tokens, constants["Q_HEADS"], grid[2])
    parts, lse = run.view("out", *shape, constants["VALUE_SIZE"]), run.view("lse", *shape)
    parts[:], lse[:] = 0, -np.inf
    parts[:, :, 0], lse[:, :, 0] = out, 0


def combine_splits(device: FakeDevice, code: bytes, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
    run = _Launched(device, code, arguments)
    splits, size = int(run.given["splits"]), run.constants["VALUE_SIZE"]
    weights = np.exp(run.view("lse", grid[0], splits))
    parts = run.view("parts", grid[0], splits, size)
    with np.errstate(invalid="ignore"):  # of tokens that no request has
        run.view("out", grid[0], size)[:] = (parts * weights[..., None]).sum(1) / weights.sum(1)[..., None]


def largest(device: FakeDevice, code: bytes, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
    run, (rows, pieces, _) = _Launched(device, code, arguments), grid
    size, vocab = run.constants["PIECE"], run.constants["V"]
    logits = run.view("logits", rows, vocab)
    for piece in range(pieces):
        some = logits[:, piece * size : (piece + 1) * size]
        run.view("values", rows, pieces)[:, piece] = some.max(1)
        run.view("places", rows, pieces, dtype=I32)[:, piece] = some.argmax(1) + piece * size


def choose_largest(device: FakeDevice, code: bytes, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
    run, rows = _Launched(device, code, arguments), grid[0]
    values = run.view("values", rows, run.constants["C"])
    places = run.view("places", rows, run.constants["C"], dtype=I32)
    run.view("tops", rows)[:] = values.max(1)
    run.view("tokens", rows, dtype=I32)[:] = places[np.arange(rows), values.argmax(1)]


def know_kernels() -> None:
    """Launches of these entries are what is above: of sampling what greedy tokens take."""
    known = (kv_write, paged_attention, combine_splits, largest, choose_largest)
    KERNELS.update({of.__name__: of for of in known})
