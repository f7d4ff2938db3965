"""Reads how a folder's weights are quantized: the method that packed them, and its settings for each module.

The settings are in ``quantization_config`` of config.json, or in another file of the folder (``CONFIGS_BESIDE``). Each
method's section is read by a function of the table ``_METHODS``. Nothing here needs torch: a method that can't be read
is refused at once. ``checkpoint.py`` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from enginewright.runtime.shared.pattern_tree import TooComplexError

from .name_pattern import name_pattern

CONFIGS_BESIDE: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",  # AutoGPTQ and GPTQModel
    "quant_config.json": "awq",  # AutoAWQ, before it wrote into config.json
}
"""File that may have the section if config.json has none -> the method, for files that don't name it."""

Layout = Literal[
    "gptq",
    "awq",
    "packed",
    "int",
    "fp8",
    "nvfp4",
    "nvfp4-modelopt",
    "mxfp4",
    "mxfp4-modelopt",
    "mxfp4-blocks",
    "mxfp8",
    "bnb",
]
"""The layout of a module's tensors: a key of ``LAYOUTS`` in checkpoint.py."""

_INSTEAD = "Export from the original checkpoint in f32, f16 or bf16, and let a recipe quantize it."

_REGEX = "re:"
_BITS_OF_GPTQ = (2, 3, 4, 8)
_LINEAR = ("Linear", "LinearBase", "Embedding", "FusedMoE")
"""Names of classes that configurations use as targets, in place of names of modules."""


@dataclass(frozen=True)
class Scheme:
    """The packing of some modules' weights.

    Attributes:
        layout: the layout of the module's tensors.
        bits: bits of a value.
        group_size: values along K that share a scale; 0: a whole row, or the whole weight.
        symmetric: True if the file states that there are no zero points, or only the middle one.
        block: rows and columns of a block that shares a scale, for FP8; None for other formats.
        zeros_less_one: True if the file stores zero points minus 1, as in version 1 of GPTQ.
        ordered: True if a tensor assigns each column to its group, as with GPTQ's ``desc_act``.
    """

    layout: Layout
    bits: int = 8
    group_size: int = 0
    symmetric: bool = True
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False
    ordered: bool = False


@dataclass(frozen=True)
class _Target:
    """A target of a configuration: the modules that a text names.

    Attributes:
        text: the module's name, a pattern of names, or a class of modules such as Linear.
        kind: "match" for a pattern that matches from the beginning of a name, "search" for one that matches anywhere.
        where: file and key, for errors.
    """

    text: str
    kind: Literal["name", "match", "search"]
    where: str

    @staticmethod
    def parse(text: str, where: str, *, default: Literal["name", "match", "search"] = "name") -> _Target:
        """Parses the text of a target in a file; patterns begin with "re:", other texts are of the kind ``default``.

        Raises SourceError if the text isn't a regular expression.
        """
        kind = "match" if text.startswith(_REGEX) else default
        target = _Target(text.removeprefix(_REGEX), kind, where)
        if kind != "name":
            try:
                name_pattern(target.text)
            except ValueError as e:
                raise SourceError(
                    f"{where}: {text!r:.80} isn't a regular expression that can be matched: {e}",
                    hint="Name the modules in another way.",
                ) from e
        return target

    def means(self, module: str) -> bool:
        """Returns True if ``module`` is one of the target's modules; False for classes. Raises SourceError."""
        if self.kind == "name":
            return self.text == module
        try:
            pattern = name_pattern(self.text)
            return pattern.match(module) if self.kind == "match" else pattern.search(module)
        except TooComplexError as e:
            raise SourceError(
                f"{self.where}: {self.text!r:.80} can't be compared with {module!r:.80}: {e}",
                hint="Name the modules in another way.",
            ) from e

    @property
    def is_class(self) -> bool:
        return self.kind == "name" and self.text in _LINEAR


@dataclass(frozen=True)
class _Group:
    """A scheme and the modules that it is for."""

    targets: tuple[_Target, ...]
    scheme: Scheme


@dataclass(frozen=True)
class QuantizedFolder:
    """The quantization of a folder's weights.

    Attributes:
        method: the method's name in messages.
        where: the file and key, for errors.
        groups: schemes with the modules that they are for. A name has precedence over a pattern, and a pattern over a
            class.
        ignored: modules that aren't quantized.
        overrides: (target, scheme), which have precedence over the groups. The first target that matches a module
            decides. A scheme of None: the module isn't quantized.
    """

    method: str
    where: str
    groups: tuple[_Group, ...]
    ignored: tuple[_Target, ...] = ()
    overrides: tuple[tuple[_Target, Scheme | None], ...] = ()

    def scheme_of(self, module: str) -> Scheme:
        """Returns the scheme of a module whose tensors are packed. Raises SourceError if none fits, or several do."""
        override = next(((t, scheme) for t, scheme in self.overrides if t.means(module)), None)
        if override is not None and override[1] is not None:
            return override[1]
        unquantized = override[0] if override else next((t for t in self.ignored if t.means(module)), None)
        if unquantized is not None:
            raise SourceError(
                f"{self.where}: {module} is packed, and {unquantized.text!r} says that it isn't quantized",
                hint="Download the checkpoint again: its configuration is of another one.",
            )
        ranks: tuple[Callable[[_Target], bool], ...] = (
            lambda target: target.kind == "name" and target.text == module,
            lambda target: target.kind != "name" and target.means(module),
            lambda target: target.is_class,
        )
        for fits in ranks:  # an exact name goes before a pattern, a pattern before a class
            schemes = {g.scheme for g in self.groups if any(fits(t) for t in g.targets)}
            if len(schemes) > 1:
                raise SourceError(
                    f"{self.where}: {module} is in {len(schemes)} groups that pack it differently",
                    hint="Name the module in one of them.",
                )
            if schemes:
                return schemes.pop()
        raise SourceError(
            f"{self.where}: no group has {module}, whose tensors are packed",
            hint="Download the checkpoint again: its configuration is of another one.",
        )


def parse_quantization(section: object, where: str) -> QuantizedFolder:
    """Parses the section of a configuration that describes quantized weights.

    Args:
        section: ``quantization_config`` as parsed JSON.
        where: its file and key, for errors.

    Raises:
        UnsupportedModelError: the method or its variant can't be read; names it.
        SourceError: a field of the section is missing or wrong.
    """
    if not isinstance(section, Mapping):
        raise SourceError(f"{where} isn't an object: it is {section!r:.40}", hint="Download the file again.")
    fields = _Fields(section, where)
    method = fields.text("quant_method", "")
    read = _METHODS.get(method.replace("_", "-").removeprefix("intel/"))
    if read is None:
        by = f" by {method}" if method else ", and quant_method doesn't say by which method"
        raise UnsupportedModelError(
            f"{where}: the checkpoint is quantized already{by}; such weights can't be read", hint=_INSTEAD
        )
    return read(fields)


@dataclass(frozen=True)
class _Fields:
    """A section of a configuration, whose fields are read with their types."""

    section: Mapping[str, Any]
    where: str

    def wrong(self, key: str, wanted: str) -> SourceError:
        return SourceError(
            f"{self.where}.{key} is {self.section.get(key)!r:.80}, not {wanted}", hint="Download the file again."
        )

    def refused(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.where}{what}, which can't be read", hint=_INSTEAD)

    def text(self, key: str, default: str) -> str:
        value = self.section.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value.lower()

    def number(self, key: str, default: int | None = None) -> int:
        value = self.section.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.section.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def targets(self, key: str) -> tuple[_Target, ...]:
        value = self.section.get(key) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "a list of names")
        return tuple(_Target.parse(name, f"{self.where}.{key}") for name in value)

    def inner(self, key: str) -> _Fields:
        value = self.section.get(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return _Fields(value, f"{self.where}.{key}")

    def pair(self, key: str) -> tuple[int, int] | None:
        value = self.section.get(key)
        if value is None:
            return None
        whole = isinstance(value, list | tuple) and all(isinstance(n, int) and n > 0 for n in value)
        if not whole or len(value) != 2:
            raise self.wrong(key, "a pair of sizes, rows and columns of a block")
        return value[0], value[1]

    def group_size(self, default: int | None = None, key: str = "group_size") -> int:
        """Reads the size of a group; 0 for whole rows, which files spell -1 or 0."""
        size = self.number(key, default)
        if size < -1:
            raise self.wrong(key, "a size, or -1 for whole rows")
        return max(size, 0)


def _everywhere(fields: _Fields, method: str, scheme: Scheme) -> QuantizedFolder:
    return QuantizedFolder(method, fields.where, (_linear(fields, scheme),))


def _linear(fields: _Fields, scheme: Scheme) -> _Group:
    """Returns the group of all modules."""
    return _Group((_Target("Linear", "name", fields.where),), scheme)


def _gptq(fields: _Fields) -> QuantizedFolder:
    """Reads a section of AutoGPTQ, GPTQModel and others; ``dynamic`` has other bits for some modules (GPTQModel)."""
    kind = fields.text("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2", "gemm") or fields.flag("is_marlin_format", False):
        raise fields.refused(f".checkpoint_format is {kind!r}" if kind != "gptq" else ".is_marlin_format is true")
    if (packed := fields.text("pack_dtype", "int32")) != "int32":
        raise fields.refused(f".pack_dtype is {packed!r}")
    if (kind := fields.text("format", kind)) not in ("gptq", "gptq_v2", "gemm"):
        raise fields.refused(f".format is {kind!r}")
    if fields.section.get("meta_lora") or fields.section.get("adapter"):
        raise fields.refused(" has an adapter")
    scheme = _bits_of_gptq(fields, Scheme("gptq", zeros_less_one=kind != "gptq_v2"))
    overrides: list[tuple[_Target, Scheme | None]] = []
    dynamic = fields.inner("dynamic") if fields.section.get("dynamic") else _Fields({}, fields.where)
    for pattern in dynamic.section:
        excluded = pattern.startswith("-:")
        target = _Target.parse(pattern.removeprefix("+:").removeprefix("-:"), dynamic.where, default="match")
        overrides.append((target, scheme if excluded else _bits_of_gptq(dynamic.inner(pattern), scheme, scheme)))
    return QuantizedFolder("GPTQ", fields.where, (_linear(fields, scheme),), overrides=tuple(overrides))


def _bits_of_gptq(fields: _Fields, scheme: Scheme, default: Scheme | None = None) -> Scheme:
    bits = fields.number("bits", default.bits if default else None)
    if bits not in _BITS_OF_GPTQ:
        raise fields.refused(f".bits is {bits}")
    size = fields.group_size(default.group_size if default else -1)
    symmetric = fields.flag("sym", default.symmetric if default else False)
    ordered = fields.flag("desc_act", default.ordered if default else False)
    return replace(scheme, bits=bits, group_size=size, symmetric=symmetric, ordered=ordered)


def _awq(fields: _Fields) -> QuantizedFolder:
    """Reads a section of AutoAWQ, packed for GEMM: https://github.com/casper-hansen/AutoAWQ."""
    kind = fields.text("version", fields.text("format", fields.text("checkpoint_format", "gemm")))
    if (backend := fields.text("backend", "auto")) in ("llm-awq", "llm_awq"):
        kind = backend
    if kind != "gemm":
        raise fields.refused(f".version is {kind!r}: only weights that AWQ packed for gemm are known")
    key = "w_bit" if "w_bit" in fields.section else "bits"  # so in quant_config.json
    if (bits := fields.number(key, 4)) != 4:
        raise fields.refused(f".{key} is {bits}")
    size = fields.group_size(128, key="q_group_size" if "q_group_size" in fields.section else "group_size")
    return _everywhere(fields, "AWQ", Scheme("awq", 4, size, not fields.flag("zero_point", True)))


_PACKINGS_OF_AUTO_ROUND: Mapping[str, str] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_gptq:exllamav2": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:llm_compressor": "mx",
}
_SPECIAL_IN_PATTERNS = frozenset("*+?^$()[]{}|\\")


def _auto_round(fields: _Fields) -> QuantizedFolder:
    """Reads a section of auto-round (https://github.com/intel/auto-round), packed as by GPTQ, AWQ or llm-compressor.

    ``extra_config`` has other settings for some modules: by name, or by a pattern that is searched in names.
    """
    kind = fields.text("packing_format", fields.text("backend", "auto_round:auto_gptq"))
    packing = _PACKINGS_OF_AUTO_ROUND.get(kind)
    if packing is None:
        raise fields.refused(f".packing_format is {kind!r}")
    extra = fields.inner("extra_config") if fields.section.get("extra_config") else _Fields({}, fields.where)
    named: list[tuple[_Target, Scheme | None]] = []
    patterns: list[tuple[_Target, Scheme | None]] = []
    for name in extra.section:
        is_pattern = any(character in _SPECIAL_IN_PATTERNS for character in name)
        target = _Target.parse(name, extra.where, default="search" if is_pattern else "name")
        (patterns if is_pattern else named).append((target, _of_auto_round(extra.inner(name), packing, fields)))
    scheme = _of_auto_round(fields, packing, fields)
    groups = () if scheme is None else (_linear(fields, scheme),)
    return QuantizedFolder("auto-round", fields.where, groups, overrides=(*named, *patterns))


def _of_auto_round(fields: _Fields, packing: str, default: _Fields) -> Scheme | None:
    """Returns the scheme of a module; None if the module isn't quantized.

    Args:
        fields: the module's own fields.
        packing: the layout of its tensors, a value of _PACKINGS_OF_AUTO_ROUND.
        default: the fields for all modules, which count where ``fields`` has none.
    """

    def merged(key: str) -> _Fields:
        return fields if fields.section.get(key) is not None else default

    bits = merged("bits").number("bits")
    if bits >= 16:
        return None
    kind = merged("data_type").text("data_type", "int")
    size = merged("group_size").group_size(128)
    if packing == "mx":
        layouts: Mapping[tuple[str, int, int], Layout] = {("mx_fp", 4, 32): "mxfp4", ("mx_fp", 8, 32): "mxfp8"}
        layouts = {**layouts, ("nv_fp", 4, 16): "nvfp4"}
        layout = layouts.get((kind[:5], bits, size))
        if layout is None or kind.endswith("e5m2"):
            raise fields.refused(f": {kind} of {bits} bits in groups of {size}")
        return Scheme(layout, bits, size)
    if kind != "int":
        raise fields.refused(f".data_type is {kind!r}")
    if bits not in (_BITS_OF_GPTQ if packing != "awq" else (4,)):
        raise fields.refused(f".bits is {bits}")
    symmetric = merged("sym").flag("sym", True)
    if packing == "awq":
        return Scheme("awq", bits, size, symmetric)
    return Scheme("gptq", bits, size, symmetric, zeros_less_one=packing == "gptq")


def _fp8(fields: _Fields) -> QuantizedFolder:
    """Reads a section of FP8 of DeepSeek, transformers and vLLM: a scale for each block, channel or weight."""
    if (kind := fields.text("fmt", "e4m3")).removeprefix("float8_").removesuffix("fn") != "e4m3":
        raise fields.refused(f".fmt is {kind!r}")
    if (experts := fields.text("expert_dtype", "fp8")) != "fp8":
        raise fields.refused(f".expert_dtype is {experts!r}")
    return _everywhere(fields, "FP8", Scheme("fp8", block=fields.pair("weight_block_size")))


def _mxfp4(fields: _Fields) -> QuantizedFolder:
    """Reads the section of gpt-oss: experts alone are MXFP4, as ``_blocks`` and ``_scales``."""
    return _everywhere(fields, "MXFP4", Scheme("mxfp4-blocks", 4, 32))


def _bitsandbytes(fields: _Fields) -> QuantizedFolder:
    """Reads a bitsandbytes section. Each weight's own tensors decide between 4 and 8 bits."""
    return _everywhere(fields, "bitsandbytes", Scheme("bnb"))


_OF_MODELOPT: Mapping[str, Scheme] = {
    "nvfp4": Scheme("nvfp4-modelopt", 4, 16),
    "w4a16_nvfp4": Scheme("nvfp4-modelopt", 4, 16),
    "fp8": Scheme("fp8"),
    "fp8_per_channel_per_token": Scheme("fp8"),
    "mxfp8": Scheme("mxfp8", 8, 32),
    "mxfp4": Scheme("mxfp4-modelopt", 4, 32),
    "w4a8_mxfp4_fp8": Scheme("mxfp4-modelopt", 4, 32),
}


def _modelopt(fields: _Fields) -> QuantizedFolder:
    """Reads a section of ModelOpt (https://github.com/NVIDIA/Model-Optimizer).

    With mixed precision it names the algorithm of each layer.
    """
    if "quantization" in fields.section:
        fields = fields.inner("quantization")
    algorithm = fields.text("quant_algo", "")
    if algorithm == "mixed_precision":
        layers = fields.inner("quantized_layers")
        groups = [
            _Group((_Target(name, "name", layers.where),), _of_modelopt(layers.inner(name))) for name in layers.section
        ]
        return QuantizedFolder("ModelOpt", fields.where, tuple(groups))
    return _everywhere(fields, "ModelOpt", _of_modelopt(fields))


def _of_modelopt(fields: _Fields) -> Scheme:
    algorithm = fields.text("quant_algo", "")
    if algorithm not in _OF_MODELOPT:
        raise fields.refused(f".quant_algo is {algorithm!r}")
    scheme = _OF_MODELOPT[algorithm]
    if scheme.group_size and fields.number("group_size", scheme.group_size) != scheme.group_size:
        raise fields.wrong("group_size", f"{scheme.group_size}, which {algorithm} has")
    return scheme


def _compressed_tensors(fields: _Fields) -> QuantizedFolder:
    """Reads a section of compressed-tensors (https://github.com/vllm-project/compressed-tensors)."""
    if fields.section.get("transform_config"):
        raise fields.refused(".transform_config rotates activations while the model runs")
    if fields.section.get("moe_sparsity_config"):
        raise fields.refused(".moe_sparsity_config leaves experts out")
    sparsity = fields.section.get("sparsity_config")
    if sparsity and (kind := fields.inner("sparsity_config").text("format", "dense")) != "dense":
        raise fields.refused(f".sparsity_config.format is {kind!r}")
    whole = fields.text("format", "")
    listed = fields.inner("config_groups")
    groups = []
    for name in listed.section:
        group = listed.inner(name)
        kind = group.text("format", whole)
        if group.section.get("weights"):
            groups.append(_Group(group.targets("targets"), _of_group(fields, group, kind)))
    if not groups:
        raise SourceError(f"{fields.where}.config_groups has no group of weights", hint="Download the file again.")
    return QuantizedFolder("compressed-tensors", fields.where, tuple(groups), fields.targets("ignore"))


def _of_group(fields: _Fields, group: _Fields, kind: str) -> Scheme:
    weights = group.inner("weights")
    bits, number = weights.number("num_bits", 8), weights.text("type", "int")
    strategy = weights.text("strategy", "group" if weights.section.get("group_size") else "channel")
    size = 0
    if strategy in ("group", "tensor_group"):
        size = weights.group_size()
    elif strategy not in ("tensor", "channel", "block"):
        raise fields.refused(f": weights with strategy {strategy!r}")
    block = weights.pair("block_structure") if strategy == "block" else None
    scheme = Scheme("packed", bits, size, weights.flag("symmetric", True), block)
    known: dict[str, tuple[Layout, str, Iterable[int]]] = {
        "pack-quantized": ("packed", "int", range(2, 9)),
        "int-quantized": ("int", "int", range(2, 9)),
        "float-quantized": ("fp8", "float", (8,)),
        "naive-quantized": ("fp8" if number == "float" else "int", number, range(2, 9) if number == "int" else (8,)),
        "nvfp4-pack-quantized": ("nvfp4", "float", (4,)),
        "mxfp4-pack-quantized": ("mxfp4", "float", (4,)),
        "mxfp8-quantized": ("mxfp8", "float", (8,)),
    }
    if kind not in known:
        raise fields.refused(f": weights in the format {kind!r}")
    layout, expected, widths = known[kind]
    if number != expected or bits not in widths:
        raise SourceError(
            f"{weights.where}: {number} of {bits} bits can't be {kind}", hint="Download the checkpoint again."
        )
    fixed_size = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(layout)
    if fixed_size is not None and size != fixed_size:
        raise SourceError(f"{weights.where}.group_size is {size}, and {kind} has groups of {fixed_size}")
    return replace(scheme, layout=layout)


_METHODS: Mapping[str, Callable[[_Fields], QuantizedFolder]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
}
"""A method's name in config.json -> the function that reads its section."""
