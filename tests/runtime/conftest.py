"""A toy executor whose tokens come out wrong if a slot, a table or a position is, and a tiny tokenizer and bundle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, TargetManifest
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.bundle.weights import SourceRows, pack
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.contracts import NO_TOKEN, CacheGroup, ExecutorCaps, ModelInfo, StepInput, StepOutput
from enginewright.runtime.shared.lowered_program import LoweredProgram, WeightUse
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.host_copies import CopiesInMemory
from tests.several_runs import run_several

VOCAB = 260  # 256 bytes and the special tokens below
BOS, EOS, START, END = 256, 257, 258, 259

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


class ToyExecutor(CopiesInMemory):
    """The next token is a checksum of all tokens in the cache up to the row, as found through the block table.

    ``script`` replaces the checksum: text that the model says, from the first new token of a request on.
    ``windows``: of groups with blocks of one size, which may be shared; 0 for none. A token sees no more than these.
    ``blocks`` may then be of each.
    With ``kept_slots`` in ``caps``, all groups have blocks of that size, too.
    ``heedless``: whether a step's runs go on after a token that ends a request.
    """

    def __init__(
        self,
        blocks: int | Sequence[int] = 64,
        block_size: int = 4,
        *,
        groups: int = 1,
        caps: ExecutorCaps = ExecutorCaps(),
        script: Mapping[int, int] | None = None,
        windows: Sequence[int] | None = None,
        heedless: bool = False,
    ) -> None:
        self.heedless, self.runs = heedless, list[int]()
        self.caps = caps if windows is None else replace(caps, shared_blocks=True)
        grow = 0 if caps.kept_slots else 1
        counts = [blocks] * len(windows or ()) if isinstance(blocks, int) else blocks
        sizes = [(block_size, window, count) for window, count in zip(windows or (), counts, strict=True)]
        if windows is None:
            assert isinstance(blocks, int)
            sizes = [(block_size << i * grow, 0, blocks >> i * grow) for i in range(groups)]
        self.cache_groups = tuple(
            CacheGroup(f"g{i}", (i,), kv_heads=1, key_head_size=1, value_head_size=1, block_size=size, window=window)
            for i, (size, window, _) in enumerate(sizes)
        )
        self.blocks = {g.name: count for g, (_, _, count) in zip(self.cache_groups, sizes, strict=True)}
        self.memory = {g.name: np.full(self.blocks[g.name] * g.block_size, -1, np.int32) for g in self.cache_groups}
        self.script = script  # position -> token
        self.steps: list[StepInput] = []
        self.fail: BaseException | None = None
        self.poison: int | None = None  # a token that makes the logits of its request NaN from there on
        self.closed = False
        self._thread = ThreadPoolExecutor(1)

    def submit(self, step: StepInput) -> Future[StepOutput]:
        if step.sources is not None:
            step.ids[step.sources >= 0] = 1 << 30  # what the host has in place of tokens doesn't count
        return self._thread.submit(self.run, step)

    def describe(self) -> dict[str, str | int]:
        return {"target": "toy"}

    cache_identity = b"toy"

    def read_block(self, group: str, block: int) -> NDArray[np.uint8]:
        return self.memory[group].reshape(self.blocks[group], -1)[block].copy().view(np.uint8)

    def write_block(self, group: str, block: int, payload: NDArray[np.uint8]) -> None:
        self.memory[group].reshape(self.blocks[group], -1)[block] = payload.view(np.int32)

    def close(self) -> None:
        self.closed = True
        self._thread.shutdown()

    def run(self, step: StepInput) -> StepOutput:
        if step.runs > 1:
            assert 1 < step.runs <= self.caps.most_runs and (np.diff(step.q_start) == 1).all()
            output = run_several(step, self.cache_groups, self.run, heedless=self.heedless)
            assert output.tokens is not None
            self.runs.append(len(output.tokens))
            return output
        if self.fail is not None:
            raise self.fail
        self._check(step)
        self.steps.append(step)
        if step.sources is not None:
            followed = step.sources >= 0
            step.ids[followed] = self._drawn[step.sources[followed]]
        for name, cleared in step.clears.items():
            self.memory[name].reshape(self.blocks[name], -1)[cleared] = -1
        for name, pairs in step.copies.items():
            assert not ((pairs[:, 0] - pairs[:, 1]) % self.caps.owners).any(), "a copy for another owner"
            blocks = self.memory[name].reshape(self.blocks[name], -1)
            blocks[pairs[:, 1]] = blocks[pairs[:, 0]]
        for group in self.cache_groups:
            self.memory[group.name][step.slots[group.name]] = step.ids
        owner = np.searchsorted(step.q_start, step.rows, side="right") - 1
        pairs = [self._token(step, r, b, row) for r, (b, row) in enumerate(zip(owner, step.rows, strict=True))]
        tokens = np.array(pairs, np.int32)
        if self.poison is not None:
            tokens[[self.poison in self._held(step, b, row) for b, row in zip(owner, step.rows, strict=True)]] = (
                NO_TOKEN
            )
        out = StepOutput(tokens=tokens if step.sampling is not None else None)
        self._drawn = tokens
        if step.wants_logits:
            out.outputs["logits"] = np.zeros((len(tokens), VOCAB), np.float32)
            out.outputs["logits"][np.arange(len(tokens)), tokens] = 1
        if step.sampling is not None and (n := step.sampling.logprobs) is not None:
            scored = NO_TOKEN if step.sampling.scored is None else step.sampling.scored
            out.token_logprobs = -np.where(scored == NO_TOKEN, tokens, scored).astype(np.float32)
            out.top_ids = tokens[:, None] + np.arange(n, dtype=np.int32)
            out.top_logprobs = -out.top_ids.astype(np.float32)
        return out

    def _check(self, step: StepInput) -> None:
        assert step.q_start[0] == 0 and step.q_start[-1] == len(step.ids) <= self.caps.max_tokens
        counts = np.diff(step.q_start)
        assert (counts > 0).all()
        first = step.kv_len - counts
        positions = [f + np.arange(c) for f, c in zip(first, counts, strict=True)]
        np.testing.assert_array_equal(step.positions, np.concatenate(positions))
        for group in self.cache_groups:
            slots = step.slots[group.name]
            assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
            table = step.block_tables[group.name]
            for row, length, start in zip(table, step.kv_len, first, strict=True):
                seen = max(start - group.window + 1, 0) // group.block_size if group.window else 0
                assert (row[seen : -(-length // group.block_size)] >= 0).all()
                known = not self.caps.chains and self.caps.most_runs == 1  # else they go when the step is over
                if self.caps.shared_blocks and self.caps.owners == 1 and known:
                    assert (row[:seen] == -1).all(), "a block that is given back"
        if not self.caps.ragged and not self.caps.kept_slots:  # of a prompt that is kept, one token may be left
            assert len({c > 1 for c in counts}) == 1 or not (first > 0).any()

    def _held(self, step: StepInput, b: int, row: int) -> NDArray[np.int32]:
        """The tokens that a row sees, as they lie in the first group's cache."""
        group = self.cache_groups[0]
        p = np.arange(int(step.positions[row]) + 1)
        slots = step.block_tables[group.name][b][p // group.block_size] * group.block_size + p % group.block_size
        return self.memory[group.name][slots]

    def _token(self, step: StepInput, r: int, b: int, row: int) -> int:
        position = int(step.positions[row])
        if self.script is not None:
            return self.script.get(position, EOS)
        total = 0
        for group in self.cache_groups:
            p = np.arange(max(position - group.window + 1, 0) if group.window else 0, position + 1)
            slots = step.block_tables[group.name][b][p // group.block_size] * group.block_size + p % group.block_size
            total = zlib.crc32(self.memory[group.name][slots].tobytes(), total)
        if step.sampling is not None and step.sampling.temperature[r] > 0:
            total = zlib.crc32(
                step.sampling.seed[r : r + 1].tobytes() + step.sampling.counter[r : r + 1].tobytes(), total
            )
        return total % 256


@pytest.fixture
def toy() -> type[ToyExecutor]:
    return ToyExecutor


@pytest.fixture(scope="session")
def tokenizer_files() -> TokenizerFiles:
    """Byte-level, without merges: token b is byte b."""
    alphabet = _byte_alphabet()
    model = models.BPE(vocab={c: b for b, c in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"])
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": None, "add_bos": False}
    return TokenizerFiles(tokenizer.to_str(), TEMPLATE, special)


def _byte_alphabet() -> list[str]:
    """The characters that ByteLevel writes for bytes 0..255 (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


@pytest.fixture(scope="session")
def tokenizer(tokenizer_files: TokenizerFiles) -> Tokenizer:
    return Tokenizer(tokenizer_files)


@pytest.fixture(scope="session")
def model_info() -> ModelInfo:
    return ModelInfo(
        name="toy",
        architecture="ToyForCausalLM",
        vocab_size=VOCAB,
        context_length=128,
        eos_token_ids=(EOS,),
        bos_token_id=BOS,
        generation_defaults={"do_sample": True, "temperature": 0.5, "top_k": 7},
    )


@pytest.fixture
def make_llm(tokenizer: Tokenizer, model_info: ModelInfo) -> Iterator[Callable[..., LLM]]:
    """``make_llm(executor, **options)``; closed after the test."""
    opened: list[LLM] = []

    def make(executor: ToyExecutor, **options: int) -> LLM:
        opened.append(LLM.from_executor(executor, model_info, tokenizer, **options))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def saying(text: str | bytes, prompt_length: int) -> dict[int, int]:
    """A script for ToyExecutor: after a prompt of so many tokens come the bytes of ``text``, then the end token."""
    data = text.encode() if isinstance(text, str) else text
    return {prompt_length - 1 + i: b for i, b in enumerate(data)}


@pytest.fixture(name="saying")
def saying_fixture() -> Callable[[str | bytes, int], dict[int, int]]:
    return saying


@pytest.fixture
def manifest(model_info: ModelInfo) -> Manifest:
    return Manifest(
        model=ModelSection.from_info(model_info),
        source=SourceSection(kind="module", name="toy"),
        targets=(),
        recipe={"name": "f32"},
        toolchain={"enginewright": "0"},
    )


WEIGHT = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


@pytest.fixture
def make_bundle(tmp_path: Path, manifest: Manifest, tokenizer_files: TokenizerFiles) -> Callable[..., Path]:
    """``make_bundle(name)`` writes a small bundle: a panel32 weight, a rows weight, a program that uses both."""

    def make(name: str = "toy.bundle", *, overwrite: bool = False) -> Path:
        program = LoweredProgram(
            cache_groups=(CacheGroup(name="full", layers=(0,), kv_heads=1, key_head_size=2, value_head_size=2),),
            weights=(
                WeightUse(name="head", dtype="f32", shape=(40, 6), layout="panel32"),
                WeightUse(name="norm", dtype="f32", shape=(6,), layout="rows"),
            ),
            buffers=(),
            steps=(),
            outputs={},
        )
        with BundleWriter(tmp_path / name, overwrite=overwrite) as writer:
            parts = [SourceRows(source="a", rows=(0, 16)), SourceRows(source="b", rows=(0, 24))]
            writer.weights().add("head", iter(pack(WEIGHT, "panel32")), "panel32", parts, shape=WEIGHT.shape)
            writer.weights().add("norm", WEIGHT[0])
            writer.write_text("targets/cpu/programs/decode.json", program.to_json())
            for path, data in tokenizer_files.to_files().items():
                writer.write_bytes(path, data)
            writer.write_text("report/report.json", "{}")
            writer.commit(manifest, {"cpu": TargetManifest()})
        return tmp_path / name

    return make
