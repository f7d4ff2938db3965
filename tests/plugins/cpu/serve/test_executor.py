"""LLM over the C++ interpreter: a hand-written model of one attention layer, against numpy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.native.executable import NUMERICS_VERSION, isas
from enginewright.plugins.native.step_profile import StepProfile
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.bundle.weights import pack
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, RequestError
from enginewright.runtime.shared.kv_formats import CacheDtype
from enginewright.runtime.shared.lowered_program import LoweredProgram
from tests.plugins.steps import tiny_onnx

V, H = 260, 8
CACHES: dict[CacheDtype, int] = {
    "f32": 32 * (H + H) * 4,
    "bf16": 32 * (H + H) * 2,
    "i8": 32 * (H + H) + 2 * 32 * 4,
    "fp8": 32 * (H + H) + 2 * 32 * 4,
}
"""Storage type of keys and values -> bytes of a block, scales included."""
RNG = np.random.default_rng(3)
TABLE: FloatArray = RNG.standard_normal((V, H)).astype(np.float32)
HEAD: FloatArray = RNG.standard_normal((V, H)).astype(np.float32)


def view(kind: str, name: str, *shape: Any, dtype: str = "f32") -> dict[str, Any]:
    """A dense operand; the first dimension may be a symbol."""
    strides = [int(np.prod(shape[i + 1 :], dtype=int)) for i in range(len(shape))]
    sizes = [{s: 1} if isinstance(s, str) else s for s in shape]
    return {"kind": kind, "name": name, "dtype": dtype, "shape": sizes, "strides": strides}


def program(cache_dtype: CacheDtype = "f32") -> LoweredProgram:
    """logits = take_rows(attention(x, x, x)) @ HEAD.T with x = TABLE[ids], one head."""
    ids, rows = view("input", "ids", "T", dtype="i32"), view("input", "rows", "R", dtype="i32")
    q_start = view("input", "q_start", 0, dtype="i32") | {"shape": [{"B": 1, "1": 1}]}
    kv_len = view("input", "kv_len", "B", dtype="i32")
    slots = view("input", "slots:full", "T", dtype="i32")
    # The width of the block table is not known at export: the table is read by its rows.
    table = view("input", "block_table:full", "B", 0, dtype="i32")
    cache = {"kind": "cache", "name": "full/0", "dtype": "f32", "shape": [], "strides": []}
    x, x3 = view("buffer", "x", "T", H), view("buffer", "x", "T", 1, H)
    a, a3, last = view("buffer", "a", "T", H), view("buffer", "a", "T", 1, H), view("buffer", "last", "R", H)
    logits = view("buffer", "logits", "R", V)
    attention = {"scale": 0.5, "window": 0, "softcap": 0.0, "has_sinks": False}
    return LoweredProgram.model_validate(
        {
            "cache_groups": [
                {"name": "full", "layers": [0], "kv_heads": 1, "key_head_size": H, "value_head_size": H}
                | {"dtype": cache_dtype}
            ],
            "weights": [
                {"name": "table", "dtype": "f32", "shape": [V, H], "layout": "rows"},
                {"name": "head", "dtype": "f32", "shape": [V, H], "layout": "panel32"},
            ],
            "buffers": [
                {"name": "x", "size": {"T": 4 * H}, "offset": 0},
                {"name": "a", "size": {"T": 4 * H}, "offset": {"T": 64}},
                {"name": "last", "size": {"R": 4 * H}, "offset": {"T": 128}},
                {"name": "logits", "size": {"R": 4 * V}, "offset": {"T": 128, "R": 64}},
            ],
            "arena_bytes": {"T": 128, "R": 64 + 4 * V + 48, "1": 64},
            "steps": [
                {"op": "embedding", "inputs": [ids, view("weight", "table", V, H)], "outputs": [x]},
                {"op": "kv_write", "inputs": [x3, x3, slots, cache], "outputs": []},
                {
                    "op": "paged_attention",
                    "inputs": [x3, cache, table, q_start, kv_len],
                    "outputs": [a3],
                    "attrs": attention,
                },
                {"op": "take_rows", "inputs": [a, rows], "outputs": [last]},
                {"op": "linear", "inputs": [last, view("weight", "head", V, H)], "outputs": [logits]},
            ],
            "outputs": {"logits": logits},
        }
    )


def reference(ids: list[int]) -> FloatArray:
    """Logits [S, V] in float64."""
    x = TABLE[ids].astype(np.float64)
    scores = np.where(np.tri(len(ids), dtype=bool), 0.5 * x @ x.T, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True)) @ x @ HEAD.T.astype(np.float64)  # type: ignore[no-any-return]


@pytest.fixture
def make_bundle(tmp_path: Path, manifest: Manifest, tokenizer_files: TokenizerFiles) -> Callable[..., Path]:
    def make(cache: CacheDtype, table: FloatArray = TABLE, name: str = "") -> Path:
        with BundleWriter(tmp_path / f"{cache}{name}.bundle") as writer:
            writer.weights().add("table", table)
            writer.weights().add("head", pack(HEAD, "panel32"), "panel32", shape=HEAD.shape)
            writer.write_text("targets/cpu/programs/decode.json", program(cache).to_json())
            for path, data in tokenizer_files.to_files().items():
                writer.write_bytes(path, data)
            writer.commit(manifest, {"cpu": TargetManifest()})
        return tmp_path / f"{cache}{name}.bundle"

    return make


@pytest.fixture
def bundle(make_bundle: Callable[[CacheDtype], Path]) -> Path:
    return make_bundle("f32")


@pytest.mark.parametrize("length", [1, 33, 100])
def test_logits_equal_numpy_whole_and_in_chunks(bundle: Path, length: int) -> None:
    ids = np.random.default_rng(length).integers(0, V, length).tolist()
    with LLM(bundle) as llm, LLM(bundle, prefill_chunk=7, threads=1) as chunked:
        logits = llm.logits(ids)
        # One attention and a product of 8: rounding is some eps of values up to about 10.
        np.testing.assert_allclose(logits, reference(ids), atol=2e-5, rtol=0)
        np.testing.assert_array_equal(chunked.logits(ids), logits)


@pytest.mark.parametrize("cache", ["bf16", "i8", "fp8"])
def test_a_cache_of_fewer_bits_is_close_and_the_same_in_chunks(
    cache: CacheDtype, make_bundle: Callable[[CacheDtype], Path]
) -> None:
    bundle, ids = make_bundle(cache), np.random.default_rng(1).integers(0, V, 128).tolist()
    exact = reference(ids)
    for isa in isas():
        with LLM(bundle, isa=isa) as llm, LLM(bundle, prefill_chunk=7, threads=1, isa=isa) as chunked:
            logits = llm.logits(ids)
            np.testing.assert_array_equal(chunked.logits(ids), logits)
        # The first token attends to itself alone: its logits are a product with its rounded values.
        off = np.abs(logits - exact).max() / np.abs(exact).max()
        assert 1e-5 < off < {"bf16": 0.02, "i8": 0.04, "fp8": 0.15}[cache]


@pytest.mark.parametrize("cache", list(CACHES))
def test_tokens_on_a_pool_too_small_equal_those_alone(
    cache: CacheDtype, make_bundle: Callable[[CacheDtype], Path]
) -> None:
    bundle = make_bundle(cache)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, V, rng.integers(1, 60)).tolist() for _ in range(24)]
    params = [
        SamplingParams(max_tokens=int(n), ignore_eos=True, temperature=i % 2, logprobs=i % 3)
        for i, n in enumerate(rng.integers(1, 60, 24))
    ]
    with LLM(bundle) as llm:
        alone = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    with LLM(bundle, memory=8 * CACHES[cache], prefill_chunk=16) as tight:
        assert tight.info()["kv_cache_bytes"] == 8 * CACHES[cache]
        assert tight.info()["kv_cache"].endswith(" KiB, 8 blocks of 32 tokens = 256 tokens")
        assert tight.generate(prompts, params) == alone
        assert tight.engine.preemptions > 0
        assert tight.engine.pools["full"].free_blocks == 8


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("isa", sorted({isas()[0], "portable"}))
def test_one_request_of_nan_ends_alone(cache: CacheDtype, isa: str, make_bundle: Callable[..., Path]) -> None:
    """Some prompts have a token whose embedding is NaN, and so are their logits. The others' tokens and logprobs are
    what they are without these, on a pool so small that they get each other's blocks, and that of prompts in chunks."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, V // 2, rng.integers(1, 60)).tolist() for _ in range(18)]
    params = [
        SamplingParams(max_tokens=int(n), ignore_eos=True, temperature=i % 2, top_p=0.9, logprobs=2)
        for i, n in enumerate(rng.integers(1, 40, 18))
    ]
    bad = [i for i in range(18) if i % 3 == 1]
    good = [i for i in range(18) if i % 3 != 1]
    with LLM(make_bundle(cache), isa=isa) as llm:
        alone = [llm.generate(prompts[i], params[i])[0] for i in good]
    poison = next(i for i in range(V // 2, V) if not any(i in result.token_ids for result in alone))
    table = TABLE.copy()
    table[poison] = np.nan
    with LLM(make_bundle(cache, table, "-nan"), isa=isa, memory=8 * CACHES[cache], prefill_chunk=16) as llm:
        for i in bad:
            prompts[i].insert(len(prompts[i]) // 2, poison)
        together = llm.generate(prompts, params)
        assert [together[i] for i in good] == alone
        for i in bad:
            assert (together[i].finish_reason, together[i].token_ids) == ("error", ())
            assert "logits for new token 0 are NaN or infinite" in str(together[i].error)
        assert llm.engine.pools["full"].free_blocks == 8
        for call in (
            lambda: llm.generate(prompts[1]),
            lambda: list(llm.stream(prompts[1])),
            lambda: llm.logits([poison]),
        ):
            with pytest.raises(EnginewrightError, match="are NaN or infinite"):
                call()
        assert llm.generate(prompts[0], params[0])[0] == alone[0]


@pytest.mark.matrix
@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_a_repetition_penalty_in_any_company(penalty: float, bundle: Path) -> None:
    """Tokens and logprobs are the same alone, preempted, in chunks, on every instruction set, and as the reference
    says: the largest of the logits after transformers' rule."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, V, rng.integers(1, 60)).tolist() for _ in range(24)]
    params = [
        SamplingParams(
            max_tokens=int(n),
            ignore_eos=True,
            temperature=i % 2,
            logprobs=1,
            repetition_penalty=(penalty, 1.0)[i % 4 == 3],
        )
        for i, n in enumerate(rng.integers(1, 60, 24))
    ]
    for isa in isas():
        with LLM(bundle, isa=isa) as llm:
            alone = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
            ids = prompts[2] + list(alone[2].token_ids)
            logits = llm.logits(ids)
        for at in range(len(prompts[2]), len(ids)):
            row, seen = logits[at - 1].copy(), np.unique(ids[:at])
            row[seen] = np.where(row[seen] < 0, row[seen] * np.float32(penalty), row[seen] / np.float32(penalty))
            assert row.argmax() == ids[at]
        with LLM(bundle, isa=isa, memory=8 * CACHES["f32"], prefill_chunk=16, threads=2) as tight:
            assert tight.generate(prompts, params) == alone
            assert tight.engine.preemptions > 0


def test_greedy_tokens_are_the_best_of_the_logits(bundle: Path) -> None:
    with LLM(bundle, memory="1MiB") as llm:
        (result,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2))
        ids = [5, 6, 7, *result.token_ids]
        logits = llm.logits(ids)[2:-1]
        assert logits.argmax(1).tolist() == list(result.token_ids)
        assert result.logprobs is not None
        for row, entry in zip(logits.astype(np.float64), result.logprobs, strict=True):
            logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert entry.logprob == pytest.approx(logprobs.max(), abs=1e-5)
            assert [i for i, _ in entry.top] == np.argsort(-row)[:2].tolist()


def test_times_are_added_up_while_a_profile_is_set(bundle: Path) -> None:
    with LLM(bundle, threads=1, speculate=None) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        plain = llm.generate([5, 6, 7], params)
        executor = llm.engine.executor
        assert isinstance(executor, CpuExecutor)
        executor.profile = profile = StepProfile()
        assert llm.generate([5, 6, 7], params) == plain
        executor.profile = None
        assert llm.generate([5, 6, 7], params) == plain
    assert profile.runs == 5
    assert {total.key: total.calls for total in profile.by_op()} == dict.fromkeys(
        ("embedding", "kv_write", "paged_attention", "take_rows", "linear"), 5
    )
    assert profile.seconds > profile.kernels > 0


def test_what_runs_is_described(bundle: Path) -> None:
    with LLM(bundle, threads=1, isa="portable") as llm:
        about = {"target": "cpu", "isa": "portable", "threads": 1, "numerics": NUMERICS_VERSION}
        assert llm.info()["executor"] == about


def test_the_default_pool_is_no_larger_than_needed(bundle: Path) -> None:
    with LLM(bundle, max_requests=3) as llm:
        assert llm.info()["kv_cache_tokens"] == 3 * 128


def test_wrong_options(bundle: Path) -> None:
    with pytest.raises(CapacityError, match="memory: a KV budget of 1000 B holds no block"):
        LLM(bundle, memory=1000)
    with pytest.raises(BundleError, match="no target 'cuda'"):
        LLM(bundle, target="cuda")
    with pytest.raises(EnginewrightError):
        LLM(bundle, isa="none such")


def test_verify_checks_the_hashes(bundle: Path) -> None:
    LLM(bundle, verify=True).close()
    blob = bundle / "weights/weights-00000.bin"
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    LLM(bundle).close()
    with pytest.raises(BundleError, match="SHA-256"):
        LLM(bundle, verify=True)


def test_an_executor_made_by_hand(bundle: Path) -> None:
    executor = CpuExecutor(Bundle.open(bundle), {"full": 4})
    assert executor.blocks == {"full": 4} and executor.cache_groups[0].name == "full"
    with LLM.from_executor(executor, Bundle.open(bundle).model) as llm:
        assert llm.logits([1]).shape == (1, V)


@pytest.mark.parametrize("change", ["cut off", "overwritten", "renamed into place", "read"])
def test_weights_that_change_while_they_are_in_use(tiny_bundle: Path, tmp_path: Path, change: str) -> None:
    """A file that is written to is noticed before the next step; a bundle that takes its place is nothing to it."""
    path = tmp_path / "a.bundle"
    shutil.copytree(tiny_bundle, path)
    weights = path / "weights/weights-00000.bin"
    with LLM(path, threads=1, load="read" if change == "read" else "map", verify=False) as llm:
        before = llm.generate([[5, 6]], SamplingParams(max_tokens=4))
        if change == "renamed into place":
            other = tmp_path / "other.bin"
            other.write_bytes(bytes(weights.stat().st_size))
            other.rename(weights)
        elif change == "cut off":
            os.truncate(weights, 4096)
        else:
            weights.write_bytes(bytes(weights.stat().st_size))
        if change in ("read", "renamed into place"):
            assert llm.generate([[5, 6]], SamplingParams(max_tokens=4))[0].token_ids == before[0].token_ids
            return
        with pytest.raises(BundleError, match=r"weights-00000\.bin was changed while it was in use(.|\n)*renaming"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=4))
    if change == "overwritten":
        with LLM(path, threads=1, verify=False) as llm:  # to which they are as they always were
            llm.generate([[5, 6]], SamplingParams(max_tokens=4))


def test_weights_that_are_read_are_the_mapped_ones(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    for use in bundle.program("cpu").weights:
        mapped, copied = bundle.weight(use.name), bundle.weight(use.name, "read")
        assert mapped.tobytes() == copied.tobytes() and copied.shape == mapped.shape and copied.dtype == mapped.dtype
        assert copied.ctypes.data % 64 == 0 and not copied.flags.writeable
        assert bundle.weight(use.name, "read").ctypes.data == copied.ctypes.data


def test_load_is_one_of_two_and_of_the_cpu_target(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="load: 'mmap' isn't a way to load weights"):
        LLM(tiny_bundle, load="mmap")  # type: ignore[arg-type]
    tiny_onnx.write_bundle(tmp_path / "onnx.bundle")
    with pytest.raises(RequestError, match="load: 'read' is for target 'cpu'"):
        LLM(tmp_path / "onnx.bundle", load="read")


def test_a_file_that_was_cut_off_since_the_bundle_was_opened(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "a.bundle")
    bundle = Bundle.open(tmp_path / "a.bundle")
    name = bundle.program("cpu").weights[-1].name
    os.truncate(tmp_path / "a.bundle/weights/weights-00000.bin", 4096)
    for load in ("map", "read"):
        with pytest.raises(BundleError, match=r"4,096 bytes, and it had .* when the bundle was opened"):
            bundle.weight(name, load)


def test_caches_beyond_the_memory_are_refused_before_they_are_made(tiny_bundle: Path) -> None:
    """The system would promise them, and end the process once they are written to."""
    bundle = Bundle.open(tiny_bundle)
    blocks = {group.name: (2**31 - 1) // 32 for group in bundle.program("cpu").cache_groups}
    with pytest.raises(CapacityError, match=r"memory: a KV cache of .* is more than the .* that are free"):
        CpuExecutor(bundle, blocks)
