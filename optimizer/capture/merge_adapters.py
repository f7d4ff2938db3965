"""Merges PEFT adapters into a model's weights: an adapter's tensors become expressions over the weights.

An adapter's tensor has the name of the module that it was trained on, perhaps by another version of transformers. The
name is looked up among the model's parameters, then after transformers' own renaming of tensors, then among the
checkpoint's tensors: separately stored experts are adapted before they are stacked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from enginewright.passes.ir.adapted import Adapted, Added, Change, LowRank, Replaced, ReplacedRows, Step
from enginewright.passes.ir.weights import Cast, WeightExpr
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .adapter_config import WEIGHTS, AdapterConfig, read_adapter_config
from .huggingface import read_file
from .model_source import Adapter
from .text_part import text_tensors

_PREFIX = "base_model.model."
_ROLES: Mapping[str, str] = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_magnitude_vector": "magnitude",
    ".token_adapter.trainable_tokens_delta": "rows",
}
"""End of a tensor's name -> the tensor's role. The rest of the name is that of the module."""

_WRAPPED = ".base_layer"
_ANOTHER = "The adapter was trained on another model, or on one whose vocabulary was resized: pass that base model."
_LINEAR, _TABLE = (torch.nn.Linear, Conv1D), torch.nn.Embedding
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)

Changes = dict[str, list[Change]]


@dataclass
class _OpenAdapter:
    """An adapter with its tensors, grouped by the module in their names; ``_ROLES`` lists the tensors' roles."""

    adapter: Adapter
    config: AdapterConfig
    modules: dict[str, dict[str, WeightExpr]] = field(default_factory=lambda: defaultdict(dict))
    plain: dict[str, WeightExpr] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return str(self.adapter.folder / WEIGHTS)


class AdapterMerge:
    """Applies adapters to the weights of a model: to the checkpoint's tensors, and to the model's parameters.

    Args:
        model: from ``build_model``.
        adapters: in the order of merging.
        checkpoint: the tensors of a directory by their names there; None for a GGUF file.
        whole: all tensors of a model with several parts, if ``model`` is its text decoder. Changes to the other parts
            are ignored.

    Raises:
        SourceError: a file is damaged, or a tensor doesn't belong to this model; names the tensor.
        UnsupportedModelError: a key of adapter_config.json, or a kind of module, that can't be merged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: Sequence[Adapter],
        checkpoint: Mapping[str, WeightExpr] | None,
        *,
        whole: Mapping[str, WeightExpr] | None = None,
    ) -> None:
        self._model, self._checkpoint = model, checkpoint or {}
        self._state = model.state_dict(keep_vars=True)
        self._of_model: Changes = defaultdict(list)
        self._of_checkpoint: Changes = defaultdict(list)
        self._tied = _tied_names(model)
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        for adapter in adapters:
            self._add(_open(adapter), whole)

    @property
    def unties(self) -> bool:
        """True if tied parameters are adapted differently, so that they must become separate."""
        return any(self._of_model.get(name) != self._of_model.get(group[0]) for group in self._tied for name in group)

    def on_checkpoint(self, tensors: Mapping[str, WeightExpr]) -> dict[str, WeightExpr]:
        """Returns the checkpoint's tensors with the changes that the adapters make to them.

        If there are such changes, all tensors are float32, so that they can be stacked.
        """
        if not self._of_checkpoint:
            return dict(tensors)
        floats = {name: _as_float(expr) for name, expr in tensors.items()}
        return {name: _adapted(expr, self._of_checkpoint.get(name)) for name, expr in floats.items()}

    def on_model(self, weights: Mapping[str, WeightExpr]) -> dict[str, WeightExpr]:
        """Returns the model's weights (from ``bind_weights``) with the adapters' changes."""
        return {name: _adapted(expr, self._of_model.get(name)) for name, expr in weights.items()}

    def _add(self, opened: _OpenAdapter, whole: Mapping[str, WeightExpr] | None) -> None:
        ours = self._names(opened, whole)
        steps: dict[str, list[Step]] = defaultdict(list)
        at_checkpoint: dict[str, list[Step]] = defaultdict(list)
        for name, expr in opened.plain.items():
            if name in ours:
                steps[self._replaced(opened, name, ours[name], expr)].append(Replaced(expr))
        if opened.config.keys.ensure_weight_tying:
            for group in self._tied:
                for name in set(group) - set(steps):
                    steps[name] += [step for other in group for step in steps.get(other, ())]
        renamed = False
        for module, tensors in opened.modules.items():
            if module not in ours:
                continue
            weight, is_stored = self._place(opened, module, ours[module], tensors)
            renamed |= is_stored or ours[module] != module or not weight.startswith(f"{module}.")
            if not (_is_saved_beside(tensors) or opened.config.keys.target_modules is None):
                self._check_target(opened, module, weight, tensors)
            if is_stored:
                shape = self._checkpoint[weight].shape
                at_checkpoint[weight] += _steps(opened, module, tensors, shape, _Kind(weight))
            else:
                self._adapt(opened, module, weight, tensors, steps)
        if not renamed:
            self._check_complete(opened)
        self._share(steps)
        for by_name, changes in ((steps, self._of_model), (at_checkpoint, self._of_checkpoint)):
            for name, of_name in by_name.items():
                change = Change(str(opened.adapter.folder.resolve()), opened.adapter.weight, tuple(of_name))
                changes[name].append(change)

    def _names(self, opened: _OpenAdapter, whole: Mapping[str, WeightExpr] | None) -> dict[str, str]:
        """Maps names of modules and parameters in the adapter to those in the model, or in its text decoder's
        checkpoint.
        """
        names = [*opened.modules, *opened.plain]
        if whole is None:
            return {name: name for name in names}
        # What lies below the decoder's prefix in the checkpoint, which tells towers with like names apart; of an
        # adapter whose model had other names, what lies below the prefix that most of its own have.
        probes = {_with_weight(name, name in opened.plain): name for name in names}
        stored: dict[str, str] = dict.fromkeys(whole, "")
        by_stored = {p: n for p, n in text_tensors(self._model, stored | probes, opened.file).items() if n}
        by_own = text_tensors(self._model, probes, opened.file)
        placed = max(by_stored, by_own, key=lambda places: sum(self._find(place) is not None for place in places))
        return {
            name: place if name in opened.plain else place.removesuffix(".weight") for place, name in placed.items()
        }

    def _place(
        self, opened: _OpenAdapter, module: str, name: str, tensors: Mapping[str, WeightExpr]
    ) -> tuple[str, bool]:
        """Returns the name of the weight that a module's tensors change, and True if it is a tensor of the
        checkpoint.
        """
        if (parameter := self._wrapped_parameter(opened, name)) is not None:
            return parameter, False
        if (place := self._find(_with_weight(name, False))) is not None:
            return place
        raise SourceError(
            f"{opened.file}: tensor {_first_name(tensors)} is of module {module}, which {type(self._model).__name__} "
            "doesn't have",
            hint="The adapter was trained on another model: pass its base model.",
        )

    def _find(self, name: str) -> tuple[str, bool] | None:
        """Looks for a tensor's parameter, then for its tensor in the checkpoint.

        Returns (name, False) for a parameter, (name, True) for a tensor of the checkpoint, None if there is neither.
        """
        if name in self._state:
            return name, False
        prefix = self._model.base_model_prefix
        renamed, pattern = loading.rename_source_key(name, self._renamings, self._converters, prefix, self._state)
        if pattern is None and renamed in self._state:
            return renamed, False
        return (name, True) if pattern is not None and name in self._checkpoint else None

    def _wrapped_parameter(self, opened: _OpenAdapter, name: str) -> str | None:
        """Returns the parameter that an adapter of target_parameters changes; None for a module.

        PEFT wraps the module once for each such parameter, the first one innermost; each outer wrapper adds
        ``base_layer`` to the name.
        """
        module = name
        while module.endswith(_WRAPPED):
            module = module.removesuffix(_WRAPPED)
        inner = (len(name) - len(module)) // len(_WRAPPED)
        try:
            parameters = [short for short, _ in self._model.get_submodule(module).named_parameters(recurse=False)]
        except AttributeError:
            return None
        adapted = [short for short in parameters if opened.config.targets_parameter(f"{module}.{short}")]
        return f"{module}.{adapted[-1 - inner]}" if inner < len(adapted) else None

    def _check_target(self, opened: _OpenAdapter, module: str, weight: str, tensors: Mapping[str, WeightExpr]) -> None:
        """Raises SourceError for tensors of a module that the adapter's configuration doesn't adapt."""
        inside = module.replace(_WRAPPED, "")
        if opened.config.targets_parameter(weight) or opened.config.targets(inside, linear=True):
            return
        if opened.config.keys.ensure_weight_tying and any(weight in group for group in self._tied):
            return
        raise SourceError(
            f"{opened.file}: tensor {_first_name(tensors)} is of a module that target_modules of "
            f"{opened.config.path} doesn't name",
            hint="The two files don't belong together: download the adapter again.",
        )

    def _check_complete(self, opened: _OpenAdapter) -> None:
        """Raises SourceError naming a module that the configuration adapts and that has no tensors."""
        head = self._model.get_output_embeddings()
        kinds = (*_LINEAR, _TABLE, *_CONVOLUTIONS)
        for name, module in self._model.named_modules():
            if not isinstance(module, kinds) or name in opened.modules:
                continue
            if opened.config.targets(name, linear=isinstance(module, _LINEAR) and module is not head):
                raise SourceError(
                    f"{opened.file}: tensor {_PREFIX}{name}.lora_A.weight is missing, and target_modules of "
                    f"{opened.config.path} names its module",
                    hint="The adapter is incomplete, or was trained on another model: download it again.",
                )

    def _adapt(
        self,
        opened: _OpenAdapter,
        module: str,
        weight: str,
        tensors: Mapping[str, WeightExpr],
        steps: dict[str, list[Step]],
    ) -> None:
        """Adds the changes that a module's tensors make to ``steps``."""
        path, _, short = weight.rpartition(".")
        owner = self._model.get_submodule(path)
        shape = tuple(self._state[weight].shape)
        if isinstance(owner, _CONVOLUTIONS):
            raise UnsupportedModelError(
                f"{opened.file}: tensor {_first_name(tensors)} adapts {module}, a {type(owner).__name__}, which can't "
                "be merged",
                hint="Merge the adapter with peft (merge_and_unload), and export that folder.",
            )
        if "rows" in tensors:
            rows = _rows(opened, module, tensors["rows"], shape)
            self._spread(weight, rows, steps, everywhere=True)
            tensors = {role: expr for role, expr in tensors.items() if role != "rows"}
            if not tensors:
                return
        kind = _Kind(
            weight,
            table=isinstance(owner, _TABLE),
            transposed=isinstance(owner, Conv1D) or (len(shape) == 3 and bool(getattr(owner, "is_transposed", False))),
            bias=f"{path}.bias" if short == "weight" and f"{path}.bias" in self._state else None,
        )
        adapter_steps = _steps(opened, module, tensors, shape, kind)
        for step in adapter_steps:
            target = kind.bias if isinstance(step, Added) and kind.bias is not None else weight
            tied = kind.table and opened.config.keys.ensure_weight_tying
            beside = {name.rpartition(".")[0] for group in self._tied if weight in group for name in group}
            self._spread(target, step, steps, everywhere=tied and len(beside & set(opened.modules)) < 2)

    def _replaced(self, opened: _OpenAdapter, name: str, ours: str, expr: WeightExpr) -> str:
        """Returns the parameter that a tensor replaces: one of modules_to_save, a bias, or a saved table or head.

        Raises SourceError if there is no such parameter, or the adapter doesn't train it.
        """
        keys = opened.config.keys
        target = ours.replace(f"{_WRAPPED}.", ".")
        place = self._find(target)
        target = target if place is None else place[0]
        ends = {f"{n}.weight" for n, m in self._model.named_modules() if m in _ends_of(self._model)}
        is_bias = keys.bias != "none" and target.endswith(".bias")
        saved = opened.config.saves(name)
        if target not in self._state or not (saved or is_bias or target in ends):
            what = "has no place in the model" if target not in self._state else "isn't one that the adapter trains"
            raise SourceError(
                f"{opened.file}: tensor {_name(expr)} {what}, as modules_to_save and bias of {opened.config.path} say",
                hint=_ANOTHER,
            )
        _check_shape(opened, expr, tuple(self._state[target].shape), target)
        return target

    def _share(self, steps: dict[str, list[Step]]) -> None:
        """Replaces equal steps of a table and its tied head by the same objects, so that the two stay tied."""
        for first, *others in self._tied:
            for name in others:
                alike = [
                    next((s for s in steps.get(first, ()) if _alike(s, step)), step) for step in steps.get(name, ())
                ]
                if alike:
                    steps[name] = alike

    def _spread(self, name: str, step: Step, steps: dict[str, list[Step]], *, everywhere: bool) -> None:
        """Adds a step to a parameter.

        Args:
            name: the parameter.
            step: the change of its weights.
            steps: parameter -> its steps so far.
            everywhere: True adds the step under all names of a tied parameter.
        """
        names = next((group for group in self._tied if name in group), (name,)) if everywhere else (name,)
        for one in names:
            if step not in steps[one]:
                steps[one].append(step)


@dataclass(frozen=True)
class _Kind:
    """A weight that adapters can change, and the kind of its module.

    Attributes:
        weight: the parameter's name.
        table: True if the module is a table of tokens.
        transposed: True if the weight is stored [inputs, outputs].
        bias: the name of the module's bias; None if it has none.
    """

    weight: str
    table: bool = False
    transposed: bool = False
    bias: str | None = None


def _steps(
    opened: _OpenAdapter, module: str, tensors: Mapping[str, WeightExpr], shape: tuple[int, ...], kind: _Kind
) -> list[Step]:
    """Returns the steps that add a module's low-rank product and bias.

    Raises SourceError for a tensor that is missing or misshapen.
    """
    config = opened.config
    first, second = ("embedding_A", "embedding_B") if kind.table else ("A", "B")
    expected = {first, second, *(["magnitude"] if config.keys.use_dora else [])}
    expected |= {"bias"} if config.keys.lora_bias else set()
    if missing := sorted(expected - set(tensors)):
        ends = {role: end for end, role in _ROLES.items()}
        raise SourceError(
            f"{opened.file}: tensor {_PREFIX}{module}{ends[missing[0]]} is missing",
            hint="The adapter is incomplete: download it again.",
        )
    if strange := sorted(set(tensors) - expected):
        raise SourceError(
            f"{opened.file}: tensor {_name(tensors[strange[0]])} isn't one that {config.path} says of a "
            f"{'table of tokens' if kind.table else 'linear module'}",
            hint="The two files don't belong together: download the adapter again.",
        )
    rank, scale = config.scaling(module)
    experts = shape[0] if len(shape) == 3 else 0
    if len(shape) not in (2, 3):
        raise UnsupportedModelError(f"{opened.file}: tensor {_name(tensors[first])} adapts {kind.weight} {shape}")
    turned = kind.transposed or kind.table
    outputs, inputs = reversed(shape[-2:]) if turned else shape[-2:]
    rows = rank * max(experts, 1)
    _check_shape(opened, tensors[first], (rows, inputs), kind.weight, rank)
    _check_shape(opened, tensors[second], (outputs, rows), kind.weight, rank)
    magnitude = tensors.get("magnitude")
    if magnitude is not None:
        _check_shape(opened, magnitude, (outputs,), kind.weight)
    steps: list[Step] = [LowRank(tensors[first], tensors[second], scale, turned, experts, magnitude)]
    if "bias" in tensors:
        if kind.bias is None:
            raise UnsupportedModelError(
                f"{opened.file}: tensor {_name(tensors['bias'])} (lora_bias) has nowhere to go: {module} has no bias",
                hint="PEFT can't merge it either: train the adapter with lora_bias=False.",
            )
        _check_shape(opened, tensors["bias"], (outputs,), kind.bias)
        steps.append(Added(tensors["bias"], scale))
    return steps


def _rows(opened: _OpenAdapter, module: str, values: WeightExpr, shape: tuple[int, ...]) -> ReplacedRows:
    """Returns the trained rows of a table as a replacement. Raises SourceError if their indices don't fit."""
    indices = opened.config.keys.trainable_token_indices
    if isinstance(indices, dict):
        indices = next((ids for name, ids in indices.items() if module == name or module.endswith(f".{name}")), None)
    if indices is None:
        raise SourceError(
            f"{opened.file}: tensor {_name(values)} has rows that trainable_token_indices of {opened.config.path} "
            "doesn't list"
        )
    if wrong := [index for index in indices if not 0 <= index < shape[0]]:
        raise SourceError(
            f"{opened.config.path}: trainable_token_indices: {wrong[0]} is outside the table of {shape[0]:,} tokens",
            hint=_ANOTHER,
        )
    _check_shape(opened, values, (len(indices), shape[1]), module)
    return ReplacedRows(values, tuple(indices))


def _check_shape(
    opened: _OpenAdapter, expr: WeightExpr, wanted: tuple[int, ...], of: str, rank: int | None = None
) -> None:
    if expr.shape != wanted:
        by = "" if rank is None else f" at rank {rank}"
        raise SourceError(
            f"{opened.file}: tensor {_name(expr)} has shape {expr.shape}, and {of} of this model needs {wanted}{by}",
            hint=_ANOTHER,
        )


def _open(adapter: Adapter) -> _OpenAdapter:
    """Names an adapter's tensors, which aren't read yet. Raises SourceError if the file is damaged."""
    opened = _OpenAdapter(adapter, read_adapter_config(adapter.folder))
    for name, expr in read_file(adapter.folder / WEIGHTS).items():
        short = name.removeprefix(_PREFIX)
        end = next((end for end in _ROLES if short.endswith(end)), None)
        if end is not None:
            opened.modules[short.removesuffix(end)][_ROLES[end]] = expr
        elif re.search(r"\.(lora_|token_adapter\.|modules_to_save\.)", short):
            raise SourceError(f"{opened.file}: tensor {name} isn't known", hint="Save the adapter with PEFT 0.21.")
        else:
            opened.plain[short] = expr
    if not opened.modules and not opened.plain:
        raise SourceError(f"{opened.file} has no tensors", hint="Download the adapter again.")
    return opened


def _tied_names(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Returns the names of each parameter that has several names."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _ends_of(model: PreTrainedModel) -> list[Any]:
    """Returns the token embedding and the head. PEFT saves them with an adapter if the vocabulary was resized."""
    return [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]


def _alike(a: Step, b: Step) -> bool:
    """Returns True if two steps make the same change to a token embedding and to its head.

    It reads the tensors if shapes are equal.
    """
    if isinstance(a, Replaced) and isinstance(b, Replaced):
        return a.values.shape == b.values.shape and torch.equal(a.values.evaluate(), b.values.evaluate())
    if not (isinstance(a, LowRank) and isinstance(b, LowRank)):
        return a == b
    pairs = [(a.a, b.b), (a.b, b.a)] if a.transposed != b.transposed else [(a.a, b.a), (a.b, b.b)]
    if a.scale != b.scale or (a.magnitude, b.magnitude) != (None, None):
        return False
    return all(
        torch.equal(x.evaluate(), y.evaluate().mT if a.transposed != b.transposed else y.evaluate()) for x, y in pairs
    )


def _is_saved_beside(tensors: Mapping[str, WeightExpr]) -> bool:
    return set(tensors) == {"rows"}


def _with_weight(name: str, is_parameter: bool) -> str:
    return name if is_parameter else f"{name.replace(_WRAPPED, '')}.weight"


def _adapted(expr: WeightExpr, changes: Sequence[Change] | None) -> WeightExpr:
    return Adapted(_as_float(expr), tuple(changes)) if changes else expr


def _as_float(expr: WeightExpr) -> WeightExpr:
    return expr if expr.dtype == torch.float32 else Cast(expr, torch.float32)


def _first_name(tensors: Mapping[str, WeightExpr]) -> str:
    return _name(next(iter(tensors.values())))


def _name(expr: WeightExpr) -> str:
    """Returns the name of a tensor in its file."""
    return expr.describe()
