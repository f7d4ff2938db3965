"""Reads the pooling that a GGUF file states, for vectors, scores or classes of whole texts.

It includes the modules after the pooling, the head of a classifier, and its labels. Reference: ``build_pooling`` and
``build_dense_out`` in llama.cpp's src/llama-graph.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from enginewright.optimizer.recipes.sections import PLACES
from enginewright.runtime.shared.contracts import DOCUMENT, QUERY, PooledTask
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .blocks import shape_of
from .file import GgufFile
from .keys import NORM, Keys
from .tensors import Place

KEY, OF_HEAD, LABELS = "pooling_type", "classifier.pooling_type", "classifier.output_labels"
AFTER = "after"
"""The prefix of the names of weights after the pooling, before the module's number."""
_EMBEDS = {1: "mean", 2: "cls", 3: "last"}
_RANK = 4
_HEAD = ("cls", "cls.norm", "cls.output")
_DENSE = ("dense_2", "dense_3")
_RERANK = "tokenizer.chat_template.rerank"
_ANSWERS = ("yes", "no")
"""The labels of a decoder's two logits. The score is the first one after a softmax over both, as in llama.cpp."""


@dataclass(frozen=True)
class Dense:
    """A linear after the pooling, with its sizes, and the activation of its result."""

    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Norm:
    """A layer norm after the pooling: its size, the number added to variances, and True if it has a bias."""

    size: int
    epsilon: float
    bias: bool


@dataclass(frozen=True)
class Pooling:
    """The pooling that a file states, and the modules after it.

    Attributes:
        task: see ``PoolingInfo``.
        kind: the kind of ``ew.pool``.
        longest: the longest text in tokens.
        modules: the modules after the pooling, in order.
        labels: the names of classes.
        tensors: tensor after the pooling -> its place.
        warnings: messages about assumptions.
        template: the text of a pair with {query} and {document}, for a reranker that is a decoder; None without one.
    """

    task: PooledTask
    kind: str
    longest: int
    modules: tuple[Dense | Norm, ...] = ()
    labels: tuple[str, ...] = ()
    tensors: Mapping[str, Place] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    template: str | None = None


def read_pooling(keys: Keys, *, encoder: bool, causal: bool, size: int, head: str) -> Pooling | None:
    """Reads the pooling of a file; None for a model that generates text.

    Args:
        keys: the file's keys.
        encoder: True if the architecture can't generate text.
        causal: True if a token doesn't see those after it.
        size: the size of a token's vector.
        head: the activation within a classifier's head.

    Raises:
        SourceError: keys and tensors contradict each other.
        UnsupportedModelError: a pooling that doesn't exist, or gives a vector for each token.
    """
    file, stated = keys.file, KEY in keys
    kind = keys.integer(KEY, 0)
    classifies = any(f"{name}.weight" in file.tensors for name in _HEAD)
    if kind == 0 and not encoder and not classifies:
        return None
    if kind == 0 and stated and encoder:
        raise keys.refusal(KEY, "is 0: a vector for each token (ColBERT)")
    if kind in (0, _RANK) and (classifies or kind == _RANK):
        return _read_head(keys, causal=causal, size=size, activation=head)
    if kind not in _EMBEDS and stated:
        raise keys.refusal(KEY, f"is {kind}: poolings are 1 (mean), 2 (cls), 3 (last) and 4 (rank)")
    if classifies:
        present = next(f"{name}.weight" for name in _HEAD if f"{name}.weight" in file.tensors)
        raise SourceError(
            f"{keys.name(KEY)} is {kind} ({_EMBEDS[kind]}), which makes vectors, and the file has the tensor {present} "
            "of a classifier",
            hint="Convert the model again, or set the key to 4 (rank).",
        )
    for name in (OF_HEAD, LABELS):  # of a head that the file doesn't have
        keys.mark_read(name)
    dense = [name for name in _DENSE if f"{name}.weight" in file.tensors]
    modules = _modules(keys, dense, size, {})
    _check_widths(keys, dense, modules)
    warning = (
        f"{keys.name(KEY)} is missing, which states how the vectors of tokens become one: their mean is taken, and "
        "normalized"
    )
    return Pooling(
        "embed",
        _EMBEDS.get(kind, "mean"),
        keys.integer("context_length"),
        modules,
        tensors=_places(dense),
        warnings=() if stated else (warning,),
    )


def _read_head(keys: Keys, *, causal: bool, size: int, activation: str) -> Pooling:
    """Reads a classifier, or a reranker, whose head is applied to one pooled row. Raises the errors of
    ``read_pooling``.
    """
    file = keys.file
    names = [name for name in _HEAD if f"{name}.weight" in file.tensors]
    if "cls" not in names and "cls.output" not in names:
        raise SourceError(
            f"{keys.name(KEY)} is {_RANK} (rank), and the tensors of a classifier (cls.weight or cls.output.weight) "
            "are missing",
            hint="Convert the model again, from a reranker.",
        )
    labels = tuple(str(label) for label in file.array(keys.name(LABELS, path=False)) or ())
    keys.mark_read(LABELS)
    answers = file.architecture == "qwen3" and "cls" not in names
    if answers and labels != _ANSWERS:
        raise UnsupportedModelError(
            f"{keys.name(LABELS)} is {list(labels)!r:.80}, and a decoder's score is made of {list(_ANSWERS)}",
            hint="Rerankers such as Qwen3-Reranker can be exported.",
        )
    kind = keys.integer(OF_HEAD, 0)
    if kind not in (0, *_EMBEDS):
        raise keys.refusal(OF_HEAD, f"is {kind}")
    pooling = _EMBEDS.get(kind, "last" if causal else "cls")
    if kind == 0 and file.architecture == "modern-bert":
        pooling = "mean"
    modules = _modules(keys, names, size, {"cls": activation})
    outputs = [module.outputs for module in modules if isinstance(module, Dense)][-1]
    if outputs != max(1, len(labels)):
        raise SourceError(
            f"{keys.name(LABELS)} has {len(labels)} labels, and the tensors of the classifier give {outputs} numbers",
            hint="Download or convert the file again.",
        )
    places = _places(names)
    if answers:
        last = modules[-1]
        assert isinstance(last, Dense)
        modules, outputs = (Dense(last.inputs, 1, last.bias, "identity"),), 1
        places = {"cls.output": Place(f"={AFTER}.0", _first_less_second)}
    return Pooling(
        "rerank" if outputs == 1 else "classify",
        pooling,
        keys.integer("context_length"),
        modules,
        labels if outputs > 1 else (),
        places,
        template=_template(file),
    )


def _first_less_second(weight: Any, config: Any) -> Any:
    """Subtracts the second row of a head for two logits [2, ...] from the first: [1, ...].

    The sigmoid of the new logit is the first value of the softmax over both.
    """
    return weight[:1] - weight[1:2]


def _modules(keys: Keys, names: list[str], size: int, activations: Mapping[str, str]) -> tuple[Dense | Norm, ...]:
    """Returns the modules of the tensors ``names``, in order.

    ``size``: the size of the vectors that the first one gets. Raises SourceError naming a tensor whose size doesn't
    match.
    """
    modules: list[Dense | Norm] = []
    file = keys.file
    for name in names:
        shape, bias = shape_of(file.tensors[f"{name}.weight"]), f"{name}.bias" in file.tensors
        if shape[-1:] != (size,) or len(shape) != (1 if name == "cls.norm" else 2):
            raise SourceError(
                f"{file.path}: tensor {name}.weight has shape {shape}, for vectors of {size} dimensions",
                hint="Download or convert the file again.",
            )
        if name == "cls.norm":
            modules.append(Norm(size, keys.number(NORM), bias))
            continue
        modules.append(Dense(size, shape[0], bias, activations.get(name, "identity")))
        size = shape[0]
    return tuple(modules)


def _check_widths(keys: Keys, names: list[str], modules: tuple[Dense | Norm, ...]) -> None:
    """Raises SourceError if a key states another width of a dense layer than its tensor has."""
    for name, module in zip(names, modules, strict=True):
        assert isinstance(module, Dense)
        for key, width in ((f"{name}_feat_in", module.inputs), (f"{name}_feat_out", module.outputs)):
            if (stated := keys.integer(key, width)) != width:
                raise SourceError(
                    f"{keys.name(key)} is {stated}, and the tensor {name}.weight has {width}",
                    hint="Download or convert the file again.",
                )


def _places(names: list[str]) -> dict[str, Place]:
    return {name: Place(f"={AFTER}.{number}") for number, name in enumerate(names)}


def _template(file: GgufFile) -> str | None:
    """Returns the text of a pair; None if the file has none. Raises SourceError if it lacks one of the two texts."""
    text = file.metadata.get(_RERANK)
    if text is None:
        return None
    if not isinstance(text, str) or PLACES.findall(text) != [QUERY, DOCUMENT]:
        raise SourceError(
            f"{file.path}: {_RERANK} isn't a text with {QUERY} once, and {DOCUMENT} once after it",
            hint="Download or convert the file again.",
        )
    return text
