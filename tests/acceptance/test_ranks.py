"""A model cut for several ranks has the bits of one: logits of prompts, chunks and decoding, in every partition.

The ranks are threads here; tests/plugins/cpu/serve has them as processes, and test_law.py everything at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.plugins.cpu.extension import cpu_extension
from enginewright.plugins.cpu.serve.ranked import RankedExecutor
from enginewright.plugins.native.executable import CpuProgram, isas
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.contracts import FloatArray, StepInput
from enginewright.runtime.shared.errors import CapacityError, RequestError
from enginewright.runtime.shared.lowered_program import LoweredProgram

from .test_formats import RECIPES
from .test_law import MORE
from .tiny_configs import tiny_family

FAMILIES = ("llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "phi3", "qwen2")
WEIGHTS = ("f32", "bf16", "int8", "int4", "three", "offsets", "fp8", "sparse32")
CACHES = ("f32", "bf16", "int8", "fp8", "k6v4")
CASES = [(family, weights, "f32") for family in FAMILIES for weights in WEIGHTS] + [
    (family, "int8", cache) for family in FAMILIES for cache in CACHES[1:]
]
PARTITIONS = ("tensor=2", "tensor=3", "tensor=4", "pipeline=2", "pipeline=3", "tensor=2,pipeline=2")
RINGS = ("ring=2", "ring=3", "ring=4")
SEVEN_TO_ONE = {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64}

BLOCKS = 8  # of each request
COUNTS = ((5, 0, 0), (1, 40, 0), (1, 1, 70), (1, 1, 1), (3, 2, 1), (0, 1, 150))
"""New tokens of three requests in each step: prompts, chunks, decoding, and rows as drafts have them."""

LONG_BLOCKS = 40
LONG_COUNTS = ((5, 0, 0), (1, 530, 0), (1, 1, 70), (510, 1, 1), (3, 2, 1), (0, 500, 150))
"""Counts of steps with several splits of 512 keys."""


def tables_of(owners: int) -> NDArray[np.int32]:
    """Makes tables of blocks in any order; if keys have several owners, all blocks of a split have a random one."""
    if owners == 1:
        return np.arange(1, 1 + 3 * BLOCKS, dtype=np.int32).reshape(3, BLOCKS)
    rng = np.random.default_rng(9)
    free = [[b for b in rng.permutation(3 * LONG_BLOCKS * owners) if b % owners == owner] for owner in range(owners)]
    splits = [(rng.integers(owners), min(16, LONG_BLOCKS - at)) for _ in range(3) for at in range(0, LONG_BLOCKS, 16)]
    blocks = [free[owner].pop() for owner, count in splits for _ in range(count)]
    return np.array(blocks, np.int32).reshape(3, LONG_BLOCKS)


def steps(groups: Sequence[str], vocab: int, owners: int = 1) -> Iterator[StepInput]:
    rng = np.random.default_rng(7)
    lengths = [0, 0, 0]
    tables = tables_of(owners)
    for counts in COUNTS if owners == 1 else LONG_COUNTS:
        there = [r for r in range(3) if lengths[r] + counts[r] > 0]
        places = [(r, lengths[r] + i) for r in there for i in range(counts[r])]
        for r in there:
            lengths[r] += counts[r]
        ends = np.cumsum([0, *(counts[r] for r in there)], dtype=np.int32)
        slots = np.array([tables[r][p // 32] * 32 + p % 32 for r, p in places], np.int32)
        yield StepInput(
            ids=rng.integers(0, vocab, len(places)).astype(np.int32),
            positions=np.array([p for _, p in places], np.int32),
            q_start=ends,
            kv_len=np.array([lengths[r] for r in there], np.int32),
            rows=np.array([end - 1 for end, r in zip(ends[1:], there, strict=True) if counts[r]], np.int32),
            slots=dict.fromkeys(groups, slots),
            block_table=dict.fromkeys(groups, tables[there]),
            outputs=("logits",),
        )


def logits_of(
    bundle: Bundle, programs: Sequence[LoweredProgram], threads: int = 1, isa: str | None = None, owners: int = 1
) -> list[FloatArray]:
    """The logits of the first rank for each step; the ranks are threads. ``owners``: ranks that share the keys."""
    whole = bundle.program("cpu")
    groups = [group.name for group in whole.cache_groups]
    vocab = whole.outputs["logits"].shape[1].constant
    shared = cpu_extension.ThreadRanks(len(programs))
    logits: list[FloatArray] = []
    problems: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            program = programs[number]
            weights = {use.name: bundle.part(use) for use in program.weights}
            blocks = dict.fromkeys(groups, 1 + 3 * BLOCKS if owners == 1 else 3 * LONG_BLOCKS * owners)
            exchange = cpu_extension.ThreadExchange(shared, number) if len(programs) > 1 else None
            one = CpuProgram(program, weights, blocks=blocks, threads=threads, isa=isa, exchange=exchange)
            for step in steps(groups, vocab, owners):
                output = one.run(step)
                if number == 0:
                    assert output.logits is not None
                    logits.append(output.logits.copy())
        except BaseException as e:  # noqa: BLE001
            problems.append(e)
            shared.abandon(f"rank {number}: {e}")

    running = [threading.Thread(target=rank, args=(number,)) for number in range(len(programs))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if problems:
        raise problems[0]
    return logits


def is_the_same_on_ranks(path: Path, wanted: Sequence[str] = PARTITIONS) -> None:
    bundle = Bundle.open(path)
    program = bundle.program("cpu")
    alone, before = list[FloatArray](), 0
    for name in wanted:
        how = Partition.parse(name)
        if how.owners != before:
            alone, before = logits_of(bundle, [program], owners=how.owners), how.owners
        ranks = logits_of(bundle, partition(program, how), threads=1 + len(name) % 2, owners=how.owners)
        assert len(ranks) == len(alone)
        for a, b in zip(alone, ranks, strict=True):
            assert a.tobytes() == b.tobytes(), name


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("ranks")

    def make(family: str, weights: str, cache: str, **more: int) -> Path:
        path = folder / f"{family}-{weights}-{cache}-{len(more)}.bundle"
        if not path.exists():
            model: PreTrainedModel = tiny_family(family, **{**MORE.get(family, {}), **more})
            name, _, chosen = weights.partition(" ")
            recipe = RECIPES.get(name, name)
            if chosen:
                recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
                recipe = recipe.model_copy(update={"adaptive_context": ContextOptions(best=32, whole_layers=0)})
            export(model, path, recipe=recipe, targets=["cpu"], kv_cache=cache)  # type: ignore[arg-type]
        return path

    return make


@pytest.mark.parametrize(("family", "weights", "cache"), CASES)
def test_bits_are_those_of_one_rank(family: str, weights: str, cache: str, exported: Callable[..., Path]) -> None:
    is_the_same_on_ranks(exported(family, weights, cache))


@pytest.mark.parametrize(("family", "weights", "cache"), CASES)
def test_bits_are_the_same_with_keys_divided(
    family: str, weights: str, cache: str, exported: Callable[..., Path]
) -> None:
    is_the_same_on_ranks(exported(family, weights, cache), RINGS)


def test_keys_of_a_split_have_one_owner(exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(exported("llama", "f32", "f32"))
    tables = tables_of(2)
    tables[1, 3] ^= 1
    monkeypatch.setattr(sys.modules[__name__], "tables_of", lambda owners: tables)
    with pytest.raises(RequestError, match="is of another owner than"):
        logits_of(bundle, partition(bundle.program("cpu"), Partition(ring=2)), owners=2)


@pytest.mark.parametrize("weights", ["f32", "int4"])
def test_seven_query_heads_of_one_kv_head(weights: str, exported: Callable[..., Path]) -> None:
    path = exported("qwen2", weights, "f32", **SEVEN_TO_ONE)
    is_the_same_on_ranks(path)
    program = Bundle.open(path).program("cpu")
    copies = [rank.cache_groups[0].kv_heads for rank in partition(program, Partition(tensor=3))]
    assert copies == [1, 1, 1]


@pytest.mark.parametrize("isa", isas())
def test_on_every_instruction_set(isa: str, exported: Callable[..., Path]) -> None:
    bundle = Bundle.open(exported("llama", "int8", "f32"))
    program = bundle.program("cpu")
    alone = logits_of(bundle, [program], isa=isa)
    ranks = logits_of(bundle, partition(program, Partition(tensor=2)), isa=isa)
    assert [a.tobytes() for a in alone] == [b.tobytes() for b in ranks]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:ranks. :RuntimeWarning")
def test_a_context_of_twice_what_a_rank_may_hold(exported: Callable[..., Path]) -> None:
    path = exported("llama", "int8", "f32", max_position_embeddings=2048)
    prompt = np.random.default_rng(3).integers(3, 250, 2000).tolist()
    params = SamplingParams(max_tokens=20, logprobs=2, ignore_eos=True)
    with LLM(path, memory="512KiB", threads=1) as llm, pytest.raises(CapacityError, match="which holds 1024"):
        llm.generate([prompt], params, progress=False)
    with LLM(path, memory="1MiB", threads=1) as llm:
        [alone] = llm.generate([prompt], params, progress=False)
    with LLM(path, memory="1MiB", threads=1, partition="ring=2") as llm:
        [divided] = llm.generate([prompt], params, progress=False)
        about, executor = llm.info(), llm.engine.executor
        assert isinstance(executor, RankedExecutor)
        used = [[memory.any(axis=(1, 2)) for memory in of_rank["full"]] for of_rank in executor._memory]
    assert divided.outputs == alone.outputs
    for rank, layers in enumerate(used):
        for blocks in layers:
            assert not blocks[1 - rank :: 2].any(), "a rank has written to a block of the other's"
            assert blocks.sum() == 32  # of 64 that 2,020 tokens have
    assert about["kv_blocks_of_ranks"] == {"full": [0, 0]}
    first, second = map(int, about["executor"]["attended"].split())
    assert 0.49 < first / (first + second) < 0.51, "the first and the last split are one rank's"


def test_a_rank_reads_its_part_of_the_weights(exported: Callable[..., Path]) -> None:
    bundle = Bundle.open(exported("llama", "int8", "f32"))
    program = bundle.program("cpu")

    def products(one: LoweredProgram) -> int:
        names = {s.inputs[3].name for s in one.steps if s.op == "quantized_linear"}
        return sum(bundle.part(use).nbytes for use in one.weights if use.name in names)

    parts = [products(rank) for rank in partition(program, Partition(tensor=2))]
    assert products(program) <= sum(parts) < 1.15 * products(program)  # both have a panel with two heads of 16
    assert max(parts) < 0.6 * sum(parts)


def test_the_order_of_ranks_that_are_ahead_is_seen(exported: Callable[..., Path]) -> None:
    """Without its meetings a partition gives other numbers, or none: the test above would see it."""
    bundle = Bundle.open(exported("llama", "f32", "f32"))
    program = bundle.program("cpu")
    first, second = partition(program, Partition(tensor=2))
    wrong = [
        one.model_copy(update={"steps": tuple(s for s in one.steps if s.op != "linear" or "o_proj" not in s.where)})
        for one in (first, second)
    ]
    alone, ranks = logits_of(bundle, [program]), logits_of(bundle, wrong)
    assert any(a.tobytes() != b.tobytes() for a, b in zip(alone, ranks, strict=True))


@pytest.mark.filterwarnings("ignore:ranks. :RuntimeWarning")
def test_loads_of_experts_are_counted(exported: Callable[..., Path]) -> None:
    path = exported("qwen3_moe", "int8", "f32")
    loads = []
    for ranks in (1, 2):
        with LLM(path, ranks=ranks, threads=1) as llm:
            llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
            loads.append(llm.info()["experts"])
    alone, two = loads
    first, last = alone["rows"].values()
    assert sum(first) == 2 * (4 + 3) and sum(last) == 2 * 4  # two experts a token; the last layer has the sampled rows
    assert two["rows"] == alone["rows"] and sum(two["of_ranks"]) == sum(first) + sum(last)
    assert two["of_ranks"] == [sum(first[:2]) + sum(last[:2]), sum(first[2:]) + sum(last[2:])]
    assert list(alone["busiest"].values()) == [round(max(rows) / (sum(rows) / 4), 2) for rows in (first, last)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tensor=5", "more than the 4 query heads"),
        ("pipeline=40", "more than there are places to cut"),
        ("tensor=0", "out of range"),
        ("tensor=65", "out of range"),
        ("rows=2", "isn't understood"),
        ("tensor=2,tensor=2", "isn't understood"),
        ("tensor=2,ring=2", "doesn't go together"),
        ("ring=5", "more than the 4 query heads"),
        ("", "isn't understood"),
    ],
)
def test_partitions_that_are_refused(text: str, problem: str, exported: Callable[..., Path]) -> None:
    program = Bundle.open(exported("llama", "f32", "f32")).program("cpu")
    with pytest.raises(RequestError, match=problem):
        partition(program, Partition.parse(text))


@pytest.mark.parametrize("text", ["tensor=4", "ring=2"])
def test_heads_that_choose_together_stay_together(text: str, exported: Callable[..., Path]) -> None:
    program = Bundle.open(exported("llama", "f32 chosen", "f32")).program("cpu")
    with pytest.raises(
        RequestError, match=r"^partition: with \[adaptive_context\] .* don't divide the 2 key/value heads"
    ):
        partition(program, Partition.parse(text))


@pytest.mark.matrix
def test_ranks_have_no_room_for_columns_of_others(exported: Callable[..., Path]) -> None:
    """Values that each rank computes for itself, such as norms, are a small part of a step's memory."""
    program = Bundle.open(exported("llama", "f32", "f32", intermediate_size=512)).program("cpu")
    whole = program.arena_bytes.t
    for count in (2, 4):
        ranks = partition(program, Partition(tensor=count))
        assert whole < sum(one.arena_bytes.t for one in ranks) + ranks[0].regions[0][1].t < 1.9 * whole
        assert all(one.arena_bytes.t < whole * (1 / count + 0.2) for one in ranks)


def test_a_partition_is_named_as_it_is_written() -> None:
    for text in ("tensor=2", "pipeline=3", "ring=4", "tensor=2,pipeline=2"):
        assert str(Partition.parse(text)) == text
    assert Partition.parse("4") == Partition(tensor=4)
    assert str(Partition()) == "tensor=1"
