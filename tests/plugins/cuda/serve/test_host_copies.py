"""Copies in pinned memory: right in any order in which two streams come to their work, and of a bundle's requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.cuda.serve import executor as cuda_executor
from enginewright.plugins.cuda.serve import host_copies
from enginewright.plugins.cuda.serve.host_copies import PinnedCopies
from enginewright.plugins.gpu.jit_launcher import products_in_order
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, RequestError
from tests.triton_interpreter import interpreter as interpreter

BLOCKS, SLOTS, SIZES = 5, 4, {"keys": 24, "states": 8}


@dataclass
class _Event:
    lane: _Lane
    count: int

    def synchronize(self) -> None:
        while self.lane.done < self.count:
            self.lane.world.advance()


class _World:
    """Two lanes, of which either may be ahead of the other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lanes = [_Lane(self), _Lane(self)]

    def advance(self) -> bool:
        """Does the next work of a lane that needn't wait; returns False if there is none."""
        ready = [lane for lane in self.lanes if lane.ready()]
        if ready:
            self.rng.choice(ready).step()
        return bool(ready)


class _Lane:
    def __init__(self, world: _World) -> None:
        self.world, self.done = world, 0
        self.queue: list[Callable[[], object] | _Event] = []

    def ready(self) -> bool:
        if self.done == len(self.queue):
            return False
        first = self.queue[self.done]
        return not isinstance(first, _Event) or first.lane.done >= first.count

    def step(self) -> None:
        first = self.queue[self.done]
        if not isinstance(first, _Event):
            first()
        self.done += 1

    def run(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def record(self) -> _Event:
        return _Event(self, len(self.queue))

    def wait(self, event: Any) -> None:
        self.queue.append(event)


class _Pools:
    """The blocks of a program."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.blocks = {name: torch.zeros((BLOCKS, size), dtype=torch.uint8) for name, size in SIZES.items()}

    def read_block(self, group: str, block: int, to: Tensor) -> None:
        to.copy_(self.blocks[group][block])

    def write_block(self, group: str, block: int, payload: Tensor) -> None:
        self.blocks[group][block] = payload


@pytest.mark.parametrize("seed", range(30))
def test_copies_are_right_in_any_order_of_two_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps write to blocks at once after a copy was begun, and copies take the memory of others."""
    monkeypatch.setattr(host_copies, "MOST_STAGES", 2 + seed % 2)
    world, pools, rng = _World(seed), _Pools(), random.Random(seed)
    memory = {name: torch.zeros((SLOTS, size), dtype=torch.uint8) for name, size in SIZES.items()}
    copies = PinnedCopies(pools, memory, *world.lanes)  # type: ignore[arg-type]
    blocks: dict[tuple[str, int], int] = {}  # what is in each at the end of all work
    slots: dict[tuple[str, int], int] = {}
    for number in range(200):
        group = rng.choice([*SIZES])
        block, slot = rng.randrange(BLOCKS), rng.randrange(SLOTS)
        what = rng.choice(("step", "step", "save", "save", "load", "read", "advance"))
        if what == "step":
            world.lanes[0].run(lambda at=pools.blocks[group][block], value=number % 250: at.fill_(value))
            blocks[group, block] = number % 250
        elif what == "save":
            copies.save(group, block, slot)
            slots[group, slot] = blocks.get((group, block), 0)
        elif what == "load" and (group, slot) in slots:
            copies.load(group, slot, block)
            blocks[group, block] = slots[group, slot]
        elif what == "read" and (group, slot) in slots:
            assert set(copies.read(group, slot).tolist()) == {slots[group, slot]}
        elif what == "advance":
            for _ in range(rng.randrange(10)):
                world.advance()
    while world.advance():
        pass
    for (group, block), value in blocks.items():
        assert set(pools.blocks[group][block].tolist()) == {value}
    for (group, slot), value in slots.items():
        assert set(memory[group][slot].tolist()) == {value}


RECIPES = {"exact": True, "plain": False}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with bundles of a tiny model, exact and not, whose kernels are interpreted."""
    folder = tmp_path_factory.mktemp("copies")
    for name, exact in RECIPES.items():
        engines = EnginesSection(dtype="f32", requests=2, chunk=64, gpus=("8.0",), exact=exact)
        recipe = load_recipe("f32").model_copy(update={"engines": engines})
        with patch.object(CudaEmitter, "_kernels", lambda *given: {}):
            export(tiny_folder, folder / f"{name}.bundle", recipe=recipe, targets=("cuda",))
    return folder


BLOCK_BYTES = 16384  # of the tiny model: 32 tokens in float32
PROMPTS = [np.random.default_rng(seed).integers(3, 250, 36).tolist() for seed in range(3)]


@products_in_order()
def answers(bundle: Path, trouble: str = "", **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The answers to prompts of which each evicts the one before, and then to the first again; the cache's counters."""

    def fails(*given: object) -> None:
        raise RuntimeError("CUDA error: the copy failed")

    options = {"context": 64, "max_requests": 1, "speculate": None, "memory": "2MiB", "verify": False} | options
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1)
    texts = []
    with LLM(bundle, target="cuda", trust="code", **options) as llm:
        for number, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
            with patch.object(PinnedCopies, trouble, fails) if trouble and number == 3 else patch.dict({}):
                [result] = llm.generate(prompt, params, progress=False)
            output = result.outputs[0]
            logprobs = [at[token].logprob for token, at in zip(output.token_ids, output.logprobs or (), strict=True)]
            texts.append((result.num_cached_tokens, output.token_ids, logprobs))
        return texts, llm.info()["prefix_cache"]


@pytest.fixture(scope="module")
def fresh(bundles: Path, interpreter: ProcessPoolExecutor) -> list[Any]:
    """The answers without copies: the last prompt is computed again."""
    texts, use = interpreter.submit(answers, bundles / "exact.bundle").result()
    assert texts[3] == texts[0] and use["host"] is None
    return texts


@pytest.mark.parametrize("name", RECIPES)
def test_an_evicted_prefix_is_copied_back(
    name: str, bundles: Path, fresh: list[Any], interpreter: ProcessPoolExecutor
) -> None:
    """Only the rest is computed; with exact steps the bits are those of a fresh prompt."""
    texts, use = interpreter.submit(answers, bundles / f"{name}.bundle", prefix_memory="4MiB").result()
    assert [text[0] for text in texts] == [0, 0, 0, 32]
    assert (use["from_host"], use["from_disk"], use["host"]["loaded"], use["host"]["evicted"]) == (32, 0, 1, 0)
    assert use["host"]["bytes"] <= use["host"]["total_bytes"] <= 4 << 20
    if RECIPES[name]:
        assert [text[1:] for text in texts] == [text[1:] for text in fresh]


@pytest.mark.parametrize("trouble", ["save", "load"])
def test_an_error_of_a_copy_changes_no_answer(
    trouble: str, bundles: Path, fresh: list[Any], interpreter: ProcessPoolExecutor
) -> None:
    texts, use = interpreter.submit(answers, bundles / "exact.bundle", trouble, prefix_memory="4MiB").result()
    assert [text[1:] for text in texts] == [text[1:] for text in fresh]
    assert use["from_host"] == (32 if trouble == "save" else 0)


def test_copies_go_on_to_a_folder(
    bundles: Path, fresh: list[Any], tmp_path: Path, interpreter: ProcessPoolExecutor
) -> None:
    """Main memory has room for a block of this model: the others are read from the folder."""
    for before in (False, True):  # the second process begins with the folder of the first
        options = {"prefix_memory": BLOCK_BYTES, "prefix_folder": tmp_path / "kept"}
        texts, use = interpreter.submit(answers, bundles / "exact.bundle", **options).result()
        assert [text[1:] for text in texts] == [text[1:] for text in fresh]
        assert use["host"]["total_bytes"] == BLOCK_BYTES and use["host"]["evicted"] > 0
        assert [text[0] for text in texts][:3] == [32 * before] * 3
        assert use["disk"]["problem"] is None


def refusals(bundle: Path) -> list[str]:
    """Messages of options that can't be, and of memory that can't be pinned."""

    def full(*given: object) -> None:
        raise CapacityError("the GPU's memory is full")

    messages = []
    options = {"context": 64, "max_requests": 1, "memory": "2MiB", "verify": False}
    with patch.object(cuda_executor._Interpreted, "pinned", full):
        for more in ({"prefix_memory": "1MiB"}, {"prefix_memory": 1}, {"prefix_memory": "much"}):
            try:
                LLM(bundle, target="cuda", trust="code", **options, **more)
            except EnginewrightError as e:
                messages.append(e.message)
    return messages


def test_memory_that_is_not_there_is_refused(bundles: Path, interpreter: ProcessPoolExecutor) -> None:
    pinned, small, wrong = interpreter.submit(refusals, bundles / "plain.bundle").result()
    assert "of main memory can't be pinned" in pinned
    assert "prefix_memory: 1 B has no room for a block" in small
    assert "prefix_memory: 'much' isn't a size" in wrong


def test_other_targets_refuse_it(tiny_bundle: Path) -> None:
    with pytest.raises(RequestError, match="prefix_memory: target 'cpu' copies no blocks"):
        LLM(tiny_bundle, threads=1, memory="4MiB", prefix_memory="1MiB")
