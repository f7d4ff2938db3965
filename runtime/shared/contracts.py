"""The contracts between all parts: cache groups, and the input and output of a step. Doesn't need torch.

Shape letters: T tokens in a step; B requests; R sampled rows; P blocks in a KV pool; K slots in a block;
Nq query heads; Nkv key/value heads; D head size; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from . import step_schema
from .dtypes import stored_bytes
from .kv_formats import KV_FORMATS, ROTATED_CACHES, SCALED_CACHES, CacheDtype
from .records import Count, Positive, Record
from .step_schema import BLOCK_TABLE, IDS, KV_LEN, LOGITS, POSITIONS, Q_START, ROWS, SLOTS, Array, group_port

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

KV_BLOCK_SIZE = 32
"""Slots in a KV block (K). Attention visits keys in tiles of this size at absolute positions."""


STATE = "state"
"""The kind of cache of recurrent layers: a block is the state of one sequence."""

STATE_TOKENS = 2**20
"""Tokens of the longest sequence that a state is kept of, the ``block_size`` of its group."""


class CachePlane(NamedTuple):
    """The keys, or the values, of a cache group.

    Attributes:
        name: "k" or "v".
        heads: the number of key/value heads (Nkv).
        size: the number of channels of a head (D).
        head_bytes: the bytes of a token in one head, with scales.
        summary_bytes: a token's share of the bytes of a block's summary, for one head. A summary has two bf16 for each
            channel, whose number is rounded up to a multiple of 16. 0 without summaries.
    """

    name: str
    heads: int
    size: int
    head_bytes: int
    summary_bytes: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a token's entry: [Nkv, D]."""
        return self.heads, self.size

    @property
    def piece_bytes(self) -> int:
        """The bytes of a token in one head, with its share of a summary."""
        return self.head_bytes + self.summary_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in all heads, with its shares of summaries."""
        return self.heads * self.piece_bytes


class CacheGroupShape(Record, frozen=True):
    """Layers whose KV caches have the same shape and lifetime.

    Attributes:
        window: the sliding window in tokens (a query at p sees keys p-window+1 .. p); 0 for full attention.
        summaries: True if each block also stores the center and spread of every channel of its keys, by which some
            layers choose blocks.
        values_in_keys: True if a value is the first ``value_head_size`` channels of its key, so that only keys are
            stored; a format with scales has one for each key.
        kind: the kind of cache if it doesn't hold keys and values (``kv_cache.kinds.table``).
        state_size: the numbers of a state, if it holds states.
        first: the tokens at the beginning of a request, in whole blocks, that queries see besides the window.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: Positive
    key_head_size: Positive
    value_head_size: Positive
    window: Count = 0
    dtype: CacheDtype = "f32"
    summaries: bool = False
    values_in_keys: bool = False
    kind: str = ""
    state_size: Count = 0
    first: Count = 0

    @property
    def holds_ends(self) -> bool:
        """True for a second cache of its layers, with the ends of each request (``KvFormat.ends``)."""
        return self.first > 0

    @property
    def planes(self) -> tuple[CachePlane, CachePlane]:
        """The keys and the values of a layer. Values that are a part of keys take no bytes."""
        value_bytes = 0 if self.values_in_keys else head_bytes(self.dtype, 1, self.value_head_size)
        summary = 2 * -(-self.key_head_size // 16) if self.summaries else 0
        return (
            CachePlane("k", self.kv_heads, self.key_head_size, head_bytes(self.dtype, 0, self.key_head_size), summary),
            CachePlane("v", self.kv_heads, self.value_head_size, value_bytes, 0),
        )

    def with_heads(self, heads: int) -> Self:
        """Returns a copy with ``heads`` key/value heads, such as the share of one rank."""
        return self.model_copy(update={"kv_heads": heads})


class CacheGroup(CacheGroupShape, frozen=True):
    """A cache group with the size of its blocks. Its layers share one block table. JSON has the same fields."""

    block_size: Positive = KV_BLOCK_SIZE

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes (Nkv, Dk, Dv, K): key/value heads, channels of a key, channels of a value, tokens of a block."""
        return self.kv_heads, self.key_head_size, self.value_head_size, self.block_size

    def stored_as(self, computed: CacheDtype) -> CacheGroup:
        """Returns the group with the type ``computed``, in which the model computes keys and values.

        A group whose format has scales or rotated integers is unchanged, and so are states, which are always float32.
        """
        fixed = self.dtype in SCALED_CACHES or self.dtype in ROTATED_CACHES or self.kind == STATE
        return self if fixed else self.model_copy(update={"dtype": computed})


def head_bytes(dtype: CacheDtype, side: Literal[0, 1], size: int) -> int:
    """Returns the bytes of keys (``side`` 0) or values (1) of one head of a token: ``size`` numbers and their scale."""
    few_bits = KV_FORMATS[dtype].few_bits
    if few_bits is not None:
        return size * few_bits[side] // 8 + 2
    return stored_bytes(dtype, size) + (4 if dtype in SCALED_CACHES else 0)


SAMPLING_OPTIONS: Mapping[str, float] = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "seed": 0,
    "counter": 0,
    "typical_p": 1,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_n_sigma": 0,
    "xtc_probability": 0,
    "xtc_threshold": 0,
}
"""The numeric options of a ``SamplingBatch``, each an array [R], and the value that disables each of them.

The C++ sampler knows them by name: a new option is a field here, one of ``RowSampling`` (sampler.h), and a line in
sampling_bindings.cpp.
"""

SAMPLING_LISTS: Mapping[str, tuple[str, ...]] = {
    "seen_start": ("seen",),
    "counted_start": ("counted", "counts"),
    "biased_start": ("biased", "bias"),
    "dry_start": ("dry", "dry_bias"),
    "allowed_start": ("allowed",),
}
"""The options of a ``SamplingBatch`` that are a list for each row: name of the starts -> names of the concatenated
lists.

Row r's list is [start[r] : start[r + 1]].
"""


class StepMasks(Protocol):
    """The masks of allowed tokens for some rows of a step, from the grammars of their answers.

    Attributes:
        rows: [R], the index of each row's mask; -1 for none.
        bits: [masks, ceil(V / 32)] uint32; bit i % 32 of word i / 32 is for token i. They are computed while the step
            runs, and valid after ``wait``.
    """

    rows: Int32Array
    bits: npt.NDArray[np.uint32]

    def wait(self) -> None:
        """Waits until all masks are computed."""

    def chosen(self, rows: npt.NDArray[np.int64]) -> StepMasks:
        """Returns the masks of the rows with these indices, in that order."""

    def longer(self, more: int) -> StepMasks:
        """Returns the masks with ``more`` additional rows, which have no mask."""

    def lists(self) -> list[Int32Array]:
        """Waits for the masks, and returns the allowed token ids of each mask."""


@dataclass
class SamplingBatch:
    """The sampling state of the R sampled rows. plugins/native/sampler.h describes each option, and their order.

    ``temperature`` 0 is greedy; SAMPLING_OPTIONS has the values that disable each option. The random number of a row
    depends only on (``seed``, ``counter``), where counter is the index of the new token in its request's output, so
    that a request draws the same tokens in any batch. None disables an option for all rows.
    """

    temperature: FloatArray
    top_k: Int32Array
    top_p: FloatArray
    min_p: FloatArray
    seed: npt.NDArray[np.uint64]
    counter: npt.NDArray[np.uint64]
    typical_p: FloatArray | None = None
    repetition_penalty: FloatArray | None = None
    frequency_penalty: FloatArray | None = None
    presence_penalty: FloatArray | None = None
    top_n_sigma: FloatArray | None = None
    xtc_probability: FloatArray | None = None
    xtc_threshold: FloatArray | None = None
    seen_start: Int32Array | None = None  # the tokens that a row's repetition penalty applies to; one that comes twice
    seen: Int32Array | None = None  # counts once
    counted_start: Int32Array | None = None  # the tokens of its output, each once,
    counted: Int32Array | None = None
    counts: Int32Array | None = None  # and how often
    biased_start: Int32Array | None = None  # the tokens whose logits change, each once,
    biased: Int32Array | None = None
    bias: FloatArray | None = None  # by so much; -infinity bans a token
    dry_start: Int32Array | None = None  # the tokens that would repeat a sequence, each once,
    dry: Int32Array | None = None
    dry_bias: FloatArray | None = None  # and what is added to their logits, after the penalties
    allowed_start: Int32Array | None = None  # the only tokens that may come; a row with none has no such limit
    allowed: Int32Array | None = None
    masks: StepMasks | None = None  # limits tokens further, by bits; for executors with ``ExecutorCaps.masks``
    top_allowed: Int32Array | None = None  # not 0: the top logprobs of a row are of tokens that may come
    logprobs: int | None = None  # how many top logprobs to return for each row, and its token's; None: no logprobs
    scored: Int32Array | None = None  # the token whose logprob is a row's; NO_TOKEN, or None: the drawn one

    def options(self) -> dict[str, Any]:
        """Returns name -> array for the C++ sampler, without options that are disabled for all rows."""
        names = (*_OPTION_NAMES, "scored", "top_allowed")
        arrays: dict[str, Any] = {name: array for name in names if (array := getattr(self, name)) is not None}
        if self.masks is not None:
            arrays |= {"masks": self.masks.bits, "mask_rows": self.masks.rows, "before_sampling": self.masks.wait}
        return arrays

    def with_lists(self) -> SamplingBatch:
        """Returns the batch with ``allowed`` instead of ``masks``, for executors that don't support masks."""
        if self.masks is None:
            return self
        lists = self.masks.lists()
        rows, banned = [], []
        for row, at in enumerate(self.masks.rows.tolist()):
            row_allowed: Int32Array | None = None
            if self.allowed_start is not None and self.allowed is not None:
                row_allowed = self.allowed[self.allowed_start[row] : self.allowed_start[row + 1]]
            if at < 0:
                rows.append(np.zeros(0, np.int32) if row_allowed is None else row_allowed)
            elif row_allowed is not None and len(row_allowed):
                rows.append(np.intersect1d(lists[at], row_allowed).astype(np.int32))
            else:
                rows.append(lists[at])
            banned.append(at >= 0 and not len(rows[-1]))
            if banned[-1]:  # an empty list would allow all
                rows[-1] = np.zeros(1, np.int32)
        batch = self if not any(banned) else self._without_token_0(banned)
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        return replace(batch, masks=None, allowed_start=starts, allowed=np.concatenate(rows).astype(np.int32))

    def _without_token_0(self, rows: Sequence[bool]) -> SamplingBatch:
        """Returns the batch with token 0 banned in the rows for which ``rows`` is True.

        No row may have another bias.
        """
        tokens, values = [], []
        for row, banned in enumerate(rows):
            entries = slice(0, 0)
            if self.biased_start is not None:
                entries = slice(int(self.biased_start[row]), int(self.biased_start[row + 1]))
            known = self.biased is not None and self.bias is not None and not banned
            tokens.append(
                self.biased[entries] if known and self.biased is not None else np.zeros(int(banned), np.int32)
            )
            values.append(
                self.bias[entries] if known and self.bias is not None else np.full(int(banned), -np.inf, np.float32)
            )
        starts = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        return replace(self, biased_start=starts, biased=np.concatenate(tokens), bias=np.concatenate(values))

    def following(self, tokens: int = 1) -> SamplingBatch:
        """Returns the batch for the same requests ``tokens`` tokens later: the same arrays except for the counters."""
        batch = object.__new__(SamplingBatch)
        batch.__dict__.update(self.__dict__)  # a quarter of what copy.copy takes
        batch.counter = self.counter + tokens
        return batch


_OPTION_NAMES = (*SAMPLING_OPTIONS, *SAMPLING_LISTS, *(name for names in SAMPLING_LISTS.values() for name in names))


class StepInput:
    """One step over T packed tokens of B requests, the same for every target. ``step_schema`` declares its arrays.

    Request b has the tokens q_start[b]:q_start[b+1]. After the step its cache holds kv_len[b] tokens, so its first
    token of this step is at position kv_len[b] - (q_start[b+1] - q_start[b]).

    Args:
        arrays: the arrays by their names in programs; None takes ``ports``.
        ports: the arrays as keywords, those of cache groups as a mapping by group.

    Attributes:
        arrays: the arrays by their names in programs.
        sampling: the sampling state of the rows; None if no tokens are sampled.
        outputs: the names of outputs needed at the rows: see ``step_schema.OUTPUTS``.
        clears: cache group -> [n], blocks to set to zero before the step.
        copies: cache group -> [n, 2], blocks (from, to) to copy in order, after that and before the step.
        sources: [T], the rows of the step submitted before whose drawn tokens are this one's; -1 where ``ids`` has the
            token. None if ``ids`` has all. See ``ExecutorCaps.chains``.
        runs: the most times that the step runs, each time with the tokens that it drew before. See
            ``ExecutorCaps.most_runs``.
        until: tokens after which it doesn't run again, whichever row draws one.
    """

    __slots__ = ("arrays", "clears", "copies", "outputs", "runs", "sampling", "sources", "until")

    def __init__(
        self,
        arrays: dict[str, Array] | None = None,
        *,
        sampling: SamplingBatch | None = None,
        outputs: tuple[str, ...] = (),
        clears: dict[str, Int32Array] | None = None,
        copies: dict[str, Int32Array] | None = None,
        sources: Int32Array | None = None,
        runs: int = 1,
        until: tuple[int, ...] = (),
        **ports: Any,
    ) -> None:
        self.arrays = step_schema.flat(ports) if arrays is None else arrays
        self.sampling, self.outputs, self.sources = sampling, outputs, sources
        self.runs, self.until = runs, until
        self.clears: dict[str, Int32Array] = {} if clears is None else clears
        self.copies: dict[str, Int32Array] = {} if copies is None else copies

    @classmethod
    def packed(
        cls,
        *,
        ids: Int32Array,
        counts: npt.ArrayLike,
        kv_len: npt.ArrayLike,
        tables: Mapping[str, Int32Array],
        groups: Iterable[CacheGroup],
        rows: npt.ArrayLike,
        more: Mapping[str, Array] | None = None,
        **others: Any,
    ) -> StepInput:
        """Returns a step of requests with consecutive tokens; computes positions, q_start and slots.

        Args:
            ids: token ids, [T].
            counts: the number of tokens of each request, [B].
            kv_len: the number of tokens in its cache after the step, [B].
            tables: cache group -> blocks of each request, [B, M].
            groups: the cache groups, with their blocks' sizes.
            rows: the tokens whose outputs are needed, [R].
            more: the arrays of ports with a provider, by name.
            others: further arguments of a step, such as ``sampling``.
        """
        lengths = np.asarray(kv_len, np.int32)
        tokens = np.asarray(counts, np.int32)
        starts = np.zeros(len(tokens) + 1, np.int32)
        tokens.cumsum(out=starts[1:])
        positions = np.arange(len(ids), dtype=np.int32) + (lengths - starts[1:]).repeat(tokens)
        arrays: dict[str, Array] = {
            IDS: ids,
            POSITIONS: positions,
            Q_START: starts,
            KV_LEN: lengths,
            ROWS: np.asarray(rows, np.int32),
        }
        for group in groups:
            owners = np.arange(len(tokens), dtype=np.int32).repeat(tokens)  # [T], the request of a token
            size, table = group.block_size, tables[group.name]
            of_states = group.kind == STATE  # which have slots for snapshots alone
            slots = np.full(len(ids), -1, np.int32) if of_states else _slots(table, owners, positions, size)
            arrays[group_port(SLOTS, group.name)] = slots
            arrays[group_port(BLOCK_TABLE, group.name)] = table
        arrays.update(more or {})
        return cls(arrays, **others)

    @property
    def ids(self) -> Int32Array:
        """Token ids, [T]."""
        return self.arrays[IDS]  # type: ignore[return-value]

    @property
    def positions(self) -> Int32Array:
        """The position of each token in its request, [T]."""
        return self.arrays[POSITIONS]  # type: ignore[return-value]

    @property
    def q_start(self) -> Int32Array:
        """The index in T of each request's first token, then T, [B+1]."""
        return self.arrays[Q_START]  # type: ignore[return-value]

    @property
    def kv_len(self) -> Int32Array:
        """The number of tokens in each request's cache after the step, [B]."""
        return self.arrays[KV_LEN]  # type: ignore[return-value]

    @property
    def rows(self) -> Int32Array:
        """The tokens (indices into T) whose outputs are needed, [R]."""
        return self.arrays[ROWS]  # type: ignore[return-value]

    @property
    def slots(self) -> dict[str, Int32Array]:
        """Cache group -> block * K + slot in the block, for each token, [T]; of states -1, or in a snapshot's block."""
        return step_schema.by_group(self.arrays, SLOTS)

    @property
    def block_tables(self) -> dict[str, Int32Array]:
        """Cache group -> blocks of each request, [B, M], padded with -1; also -1 for blocks before a window."""
        return step_schema.by_group(self.arrays, BLOCK_TABLE)

    @property
    def wants_logits(self) -> bool:
        """True if the logits of the rows are needed."""
        return LOGITS in self.outputs

    @property
    def counts(self) -> Int32Array:
        """The number of tokens of each request in this step, [B]."""
        starts = self.q_start
        return starts[1:] - starts[:-1]

    def requests_at(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Returns the request (index into B) of each token in ``rows`` (indices into T)."""
        return np.searchsorted(self.q_start, rows, side="right") - 1

    def changed(self, **changes: Any) -> StepInput:
        """Returns a copy with other arrays or attributes.

        ``changes`` names ports (``kv_len=...``) or attributes (``runs=...``).
        """
        others = {name: changes.pop(name, getattr(self, name)) for name in _STEP_OPTIONS}
        return StepInput(self.arrays | step_schema.flat(changes), **others)


def _slots(table: Int32Array, owner: Int32Array, positions: Int32Array, size: int) -> Int32Array:
    """Returns the slot of each token's key and value: block * K + index in the block, [T]."""
    places: Int32Array = table[owner, positions // size] * size + positions % size
    return places


_STEP_OPTIONS = tuple(name for name in StepInput.__slots__ if name != "arrays")


NO_TOKEN = -1
"""In ``StepOutput.tokens``: the row's logits have a NaN or +infinity, or nothing but -infinity. Its request ends."""


@dataclass
class StepOutput:
    """The results of a step: sampled tokens [R], logprobs if requested, and the outputs in ``StepInput.outputs`` by
    name.
    """

    # [R]; NO_TOKEN where the logits can't be sampled from. Of a step with several runs [n, R], a row for each run.
    tokens: Int32Array | None
    outputs: dict[str, FloatArray] = field(default_factory=dict)  # [R, ...] each
    token_logprobs: FloatArray | None = None  # [R], of the sampled token, or of the scored one
    top_ids: Int32Array | None = None  # [R, n]
    top_logprobs: FloatArray | None = None  # [R, n]

    @property
    def logits(self) -> FloatArray | None:
        """The logits [R, V]; None if they weren't requested."""
        return self.outputs.get(LOGITS)


def as_outputs(logits: FloatArray | None) -> dict[str, FloatArray]:
    """Returns logits as the outputs of a step; an empty mapping for None."""
    return {} if logits is None else {LOGITS: logits}


DRAFT_ROWS = 16
"""The most rows of a step with drafts, over all requests. Beyond that, another row costs as much time as it saves."""


@dataclass(frozen=True)
class ExecutorCaps:
    """The capabilities of an executor, which the scheduler respects.

    Attributes:
        ragged: True if prompts and decodes may share a step.
        max_tokens, max_requests: the most tokens (T) and requests (B) of a step.
        shared_blocks: True if several requests may share a block. Then ``StepInput.copies`` are supported, ``clears``
            too if masked numbers that aren't finite could spread, and tables may have -1 for blocks before a group's
                window.
        kept_slots: True if a block is the slot of a whole request, the same in every group, and a new request may
            continue after tokens that the slot's last request left.
        verifies: True if several rows of a request in one step have the same bits as in separate steps.
        in_flight: the number of steps that may be submitted before the first result is read. Without ``chains`` no
            request is in two.
        chains: True if a step may have the next token of requests whose last step is in flight: ``StepInput.sources``.
            Then ``in_flight`` is 2.
        most_runs: the most runs of a step in which each request has one token and draws the next one, without
            log-probabilities, other outputs, masks or states: ``StepInput.runs``. It may run fewer times, for example
            after a call of ``interrupt`` (``executors.base.Interruptible``).
        row_seconds: tokens of a request -> measured seconds of steps in which it had 1, 2, ... rows; empty if not
            measured.
        masks: True if sampling waits for ``SamplingBatch.masks``; other executors get lists of tokens.
        lacks: the sampling parameters that it doesn't support; requests with them are refused.
        owners: the number of ranks that divide keys and values: see ``kv_cache.cache_manager``.
        outputs: the outputs that it supports besides logits: see ``step_schema.OUTPUTS``.
        ports: the arrays of steps that its program needs besides those of every step (``step_schema.PORTS``).
    """

    ragged: bool = True
    max_tokens: int = 8192
    max_requests: int = 8192
    shared_blocks: bool = False
    kept_slots: bool = False
    verifies: bool = False
    in_flight: int = 1
    chains: bool = False
    most_runs: int = 1
    row_seconds: Mapping[int, Sequence[float]] = field(default_factory=dict)
    masks: bool = False
    owners: int = 1
    lacks: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()


Default = float | int | bool | list[str | list[int]]
"""The value of a sampling option, of the same type as in ``SamplingParams``."""


PooledTask = Literal["embed", "rerank", "classify", "token_classify"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


QUERY, DOCUMENT = "{query}", "{document}"
"""The placeholders of the two texts in the templates of ``PoolingInfo``."""


class PoolingInfo(Record, frozen=True, kw_only=True):
    """The facts about a model that gives a vector, a score or classes for a text. A bundle's manifest has the same.

    Vectors are cut to a smaller number of dimensions and normalized in the runtime, in this order.

    Attributes:
        task: what the numbers of a text are: "embed" a vector, "rerank" a score of a query and a document, "classify"
            a number for each class, "token_classify" a number for each token and class.
        dimensions: how many numbers a text, or a token, has.
        dimension_choices: smaller numbers of dimensions that vectors may be cut to (Matryoshka); () if they mustn't.
        normalize: True if a vector is divided by its length.
        activation: the function of scores and classes.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the prompt that is used if none is asked for; None for no prompt.
        include_prompt: False if the prompt's tokens aren't pooled.
        labels: the names of classes.
        similarity: how two vectors are compared: "cosine", "dot", "euclidean" or "manhattan".
        query_template, document_template: the texts of a reranker that is a decoder, with {query} and {document}; None
            for a model that takes pairs of texts.
    """

    task: PooledTask
    dimensions: Positive
    dimension_choices: tuple[Positive, ...] = ()
    normalize: bool = False
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    prompts: dict[str, str] = msgspec.field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    labels: tuple[str, ...] = ()
    similarity: Similarity = "cosine"
    query_template: str | None = None
    document_template: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model that the runtime needs besides its programs.

    ``pooling`` is None for a model that generates text. For a model that doesn't, ``context_length`` is the length of
    the longest text in tokens.
    """

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    parameters: int = 0
    generation_defaults: dict[str, Default] = field(default_factory=dict)
    pooling: PoolingInfo | None = None
