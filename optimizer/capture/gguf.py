"""Reads a GGUF file: blocks as stored, dequantized one tensor at a time when they are needed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names, configuration and how llama.cpp's converter
rearranged tensors are transformers' knowledge, applied here tensor by tensor.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from enginewright.optimizer.shared.resources import release_pages
from enginewright.passes.ir.prequantized import SourceCodes
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .config_sizes import check_sizes
from .gguf_blocks import Q2_0, SIZES, dequantize, floats, format_of, read_codes, rows_of, shape_of

# Keys (less the architecture) that change what the model computes -> the configuration's name for it.
_MEANINGFUL = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

# Factors that the models known here don't have; 0 and 1 say that there is none.
_WITHOUT_FIELD = (
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "rope.scaling.attn_factor",
)

# A divisor for each rotary frequency, which takes the place of a rope scaling in the configuration.
_ROPE_FACTORS = "rope_freqs.weight"

_DAMAGED = (ValueError, struct.error, IndexError, KeyError, TypeError, ArithmeticError, OSError, AttributeError)


class _Names:
    """Stands in for a model where transformers maps tensor names: the names of the whole and of its base model only.

    It would look into every submodule, and build the table of names for each: seconds for a small model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = list(model.state_dict())
        self._prefix: str = model.base_model_prefix

    def state_dict(self) -> list[str]:
        return self._names

    def named_children(self) -> list[tuple[str, _Names]]:
        inner = object.__new__(_Names)
        inner._names = [n.removeprefix(f"{self._prefix}.") for n in self._names if n.startswith(f"{self._prefix}.")]
        inner._prefix = ""
        return [(self._prefix, inner)] if self._prefix and inner._names else []


class _Reader(gguf.GGUFReader):
    """A reader that makes no views of an array's elements: seconds for a vocabulary, and hundreds of megabytes.

    Texts of an array are counted only, so are empty, and the tokenizer's numbers are left out: transformers' conversion
    of tokenizers reads them by itself. Other numbers are tuples of one. Tensors may have blocks of Q2_0 too.
    """

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        newer = {i: field for i, field in enumerate(fields) if field.parts[4][0] == Q2_0}
        as_read = [as_bytes(field) if i in newer else field for i, field in enumerate(fields)]
        places = sorted({*(int(field.parts[5][0]) for field in fields), len(self.data) - int(start_offs)})
        for i in newer:
            name, inner, place = bytes(fields[i].parts[1]).decode(), as_read[i].parts[3], int(fields[i].parts[5][0])
            room, size = next((n - place for n in places if n > place), 0), int(np.prod(inner))
            if room < size:
                raise ValueError(
                    f"tensor {name} has {room:,} bytes at most, blocks of Q2_0 would be {size:,}: it is cut off, or "
                    "has the blocks of 128 of an older layout, which can't be read"
                )
        super()._build_tensors(start_offs, as_read)
        for i, field in newer.items():
            dims, data = field.parts[3], self.tensors[i].data.view(np.uint8)
            self.tensors[i] = self.tensors[i]._replace(
                tensor_type=Q2_0, shape=dims, n_elements=int(np.prod(dims)), data=data
            )

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data):,} bytes, and should have {end:,} or more")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            parts: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        item = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        end = orig_offs + 12
        scalar = self.gguf_scalar_to_np.get(item)
        values: list[Any]
        if scalar is not None:
            values = list(zip(self._get(end, scalar, count).tolist(), strict=True))
            end += count * np.dtype(scalar).itemsize
        elif item == gguf.GGUFValueType.STRING:
            layout = "<Q" if self.endianess == gguf.GGUFEndian.LITTLE else ">Q"
            for _ in range(count):
                (length,) = struct.unpack_from(layout, self.data.data, end)
                end += 8 + length
            values = [b""] * count
        else:
            raise ValueError(f"an array of {item.name}")
        return end - orig_offs, values, list(range(len(values))), [gguf.GGUFValueType.ARRAY, item]

    def _push_field(self, field: gguf.ReaderField, skip_sum: bool = False) -> int:
        numbers = field.types[:1] == [gguf.GGUFValueType.ARRAY] and field.types[-1] != gguf.GGUFValueType.STRING
        if numbers and field.name.startswith("tokenizer."):
            field = field._replace(data=[])
        size: int = super()._push_field(field, skip_sum)
        return size


def as_bytes(field: gguf.ReaderField) -> gguf.ReaderField:
    """The description of a tensor in blocks of Q2_0 as one of its bytes. Raises ValueError if rows aren't blocks."""
    length, name, rank, dims, _, offset = field.parts
    size, of_block = SIZES[Q2_0]
    if dims[0] % size:
        raise ValueError(f"tensor {bytes(name).decode()} has rows of {dims[0]}, which isn't a multiple of {size}")
    inner = np.concatenate((dims[:1] // size * of_block, dims[1:])).astype(dims.dtype)
    return field._replace(parts=[length, name, rank, inner, np.array([gguf.GGMLQuantizationType.I8]), offset])


_GGUFReader = gguf.GGUFReader


@contextmanager
def quick_reader() -> Iterator[None]:
    """Within it transformers reads configurations by ``_Reader``: the package's takes ten seconds for 262k tokens."""
    gguf.GGUFReader = _Reader  # type: ignore[misc]
    try:
        yield
    finally:
        gguf.GGUFReader = _GGUFReader  # type: ignore[misc]


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file: ``tensors`` by name (mapped, not read), ``metadata`` by key without tokenizer arrays."""

    path: Path
    tensors: dict[str, gguf.ReaderTensor]
    metadata: dict[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file. Raises SourceError naming it if it is damaged or has tensors of a type that can't be read."""
    try:
        open_regular(path).close()  # the reader would wait for a pipe
        reader = _Reader(str(path))
        metadata = {k: f.contents() for k, f in reader.fields.items() if f.types[:1] != [gguf.GGUFValueType.ARRAY]}
    except _DAMAGED as e:
        raise SourceError(f"{path}: damaged or truncated GGUF file: {e}", hint="Download the file again.") from e
    if not isinstance(metadata.get("general.architecture"), str):
        raise SourceError(f"{path}: general.architecture is missing", hint="Download or convert the file again.")
    for tensor in reader.tensors:
        _check_type(path, tensor)
    return GgufFile(path, {t.name: t for t in reader.tensors}, metadata)


def read_config(file: GgufFile) -> PretrainedConfig:
    """The transformers configuration for a GGUF file.

    Raises:
        UnsupportedModelError: transformers doesn't know the architecture as GGUF, or a key that changes the numbers.
        SourceError: metadata is missing or wrong.
    """
    try:
        with quick_reader():
            config = AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name, local_files_only=True)
    except (*_DAMAGED, StrictDataclassError) as e:
        if "not supported" in str(e):
            raise UnsupportedModelError(
                f"{file.path}: general.architecture {file.architecture!r} can't be read from GGUF files: {e}",
                hint="Export from the model's Hugging Face directory.",
            ) from e
        raise SourceError(f"{file.path}: no usable configuration: {e}", hint="Convert the file again.") from e
    assert isinstance(config, PretrainedConfig)
    check_sizes(config, str(file.path))
    if (layers := int(getattr(config, "num_hidden_layers", 0))) > len(file.tensors):
        raise SourceError(
            f"{file.path}: {file.architecture}.block_count is {layers}, and there are {len(file.tensors)} tensors",
            hint="Download or convert the file again.",
        )
    _apply_meaningful_keys(file, config)
    return config


def read_tensors(file: GgufFile, model: PreTrainedModel) -> dict[str, WeightExpr]:
    """The file's tensors under the names of ``model`` (from ``build_model``), float32, dequantized when evaluated.

    Rope factors in the file are applied to the model's frequencies. Raises UnsupportedModelError where transformers has
    no map of names or rotates another width, SourceError for a tensor without a place in the model.
    """
    _check_rotary_width(file, model)
    kind: type[Any] = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
    processor: TensorProcessor = kind(config=model.config.to_dict())
    try:
        names = get_gguf_hf_weights_map(
            _Names(model), processor, model_type=file.architecture, num_layers=int(model.config.num_hidden_layers)
        )
    except NotImplementedError as e:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture {file.architecture!r}: tensor names are not known",
            hint="Export from the model's Hugging Face directory.",
        ) from e
    parts: dict[str, list[gguf.ReaderTensor]] = defaultdict(list)
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            _divide_frequencies(file, model, dequantize(tensor))
        elif name in names:
            parts[names[name]].append(tensor)
        else:
            raise SourceError(
                f"{file.path}: tensor {name} has no place in the model that the metadata describes",
                hint="Export from the model's Hugging Face directory.",
            )
    try:
        origin = str(file.path)
        return {name: _expression(name, tensors, processor, names, origin) for name, tensors in parts.items()}
    except _DAMAGED as e:
        raise SourceError(
            f"{file.path}: the tensors don't fit the metadata: {e}", hint="Download or convert the file again."
        ) from e


def generation_settings(file: GgufFile) -> dict[str, Any]:
    """Generation settings in the file: which tokens end a text."""
    ids = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(int(i) for i in ids if i is not None))
    return {"eos_token_id": ends} if ends else {}


def wants_bos(file: GgufFile) -> bool:
    """Whether texts begin with the start token; files that don't say so follow llama.cpp's default for their kind."""
    stated = file.metadata.get("tokenizer.ggml.add_bos_token")
    return bool(stated) if stated is not None else file.metadata.get("tokenizer.ggml.model") == "llama"


def _expression(
    name: str, tensors: list[gguf.ReaderTensor], processor: TensorProcessor, names: dict[str, str], origin: str
) -> WeightExpr:
    def rearranged(values: Callable[[gguf.ReaderTensor], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        whole: dict[str, Any] = {"tensors": {}}  # where processors put what several tensors make up
        result = None
        for tensor in tensors:
            result = processor.process(
                weights=values(tensor), name=tensor.name, tensor_key_mapping=names, parsed_parameters=whole
            )
        assert result is not None
        if result.name is None:
            return np.asarray(whole["tensors"][name])
        return np.asarray(result.weights)

    def read() -> torch.Tensor:
        value = np.ascontiguousarray(rearranged(dequantize), dtype=np.float32)
        result = torch.from_numpy(value if value.flags.writeable else value.copy())
        release_pages(tensors[0].data)
        return result

    # Zeros that take no memory, to see which shape the processor makes of them.
    shape = tuple(rearranged(lambda t: np.broadcast_to(np.float32(0), shape_of(t))).shape)
    label = "+".join(t.name for t in tensors)
    code_format = format_of(tensors)
    rows = None if code_format is None else rows_of(tensors, rearranged)
    if code_format is None or rows is None:
        return Source(label, shape, torch.float32, read, origin)
    codes = partial(read_codes, tensors, rows)
    return SourceCodes(label, shape, torch.float32, read, origin, format=code_format, read_codes=codes)


def _check_type(path: Path, tensor: gguf.ReaderTensor) -> None:
    """Raises SourceError if the blocks of ``tensor`` can't be dequantized, by trying on one block of zeros."""
    _, size = SIZES[tensor.tensor_type]
    try:
        floats(np.zeros((1, size), dtype=np.uint8), tensor.tensor_type)
    except (NotImplementedError, ValueError) as e:
        raise SourceError(
            f"{path}: tensor {tensor.name} has blocks of type {tensor.tensor_type.name}, which can't be dequantized",
            hint="Export from a file in F32, F16, BF16, Q8_0, Q4_1 or Q4_0.",
        ) from e


def _apply_meaningful_keys(file: GgufFile, config: PretrainedConfig) -> None:
    """Sees to it that no key of the file that changes the numbers is left out of the configuration."""
    prefix = f"{file.architecture}."
    scaling = file.metadata.get(f"{prefix}rope.scaling.type", "none")
    rope = getattr(config, "rope_parameters", None) or {}
    if scaling != "none" and rope.get("rope_type", "default") == "default":
        raise UnsupportedModelError(
            f"{file.path}: {prefix}rope.scaling.type {scaling!r} can't be read from GGUF files",
            hint="Export from the model's Hugging Face directory.",
        )
    if "rope_theta" in rope and (base := file.metadata.get(f"{prefix}rope.freq_base")):
        rope["rope_theta"] = float(base)  # not for every architecture transformers' doing
    for key in _WITHOUT_FIELD:
        if (value := file.metadata.get(prefix + key, 0)) not in (0, 1):
            raise UnsupportedModelError(
                f"{file.path}: {prefix}{key} is {value}, which can't be read from GGUF files",
                hint="Export from the model's Hugging Face directory.",
            )
    for key, field in _MEANINGFUL.items():
        value = file.metadata.get(prefix + key)
        if not value:
            continue
        if not hasattr(config, field):
            if field == "head_dim" and value * config.num_attention_heads == config.hidden_size:
                continue
            raise UnsupportedModelError(
                f"{file.path}: {prefix}{key} is {value}, which {type(config).__name__} has no field for",
                hint="Export from the model's Hugging Face directory.",
            )
        setattr(config, field, value)


def _check_rotary_width(file: GgufFile, model: PreTrainedModel) -> None:
    key = f"{file.architecture}.rope.dimension_count"
    width = file.metadata.get(key)
    widths = {2 * len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    if width and widths and width not in widths:
        raise UnsupportedModelError(
            f"{file.path}: {key} is {width}, where transformers makes a model that rotates {sorted(widths)} columns",
            hint="Export from the model's Hugging Face directory.",
        )


def _divide_frequencies(file: GgufFile, model: PreTrainedModel, factors: np.ndarray[Any, Any]) -> None:
    divided = False
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and tuple(buffer.shape) == factors.shape:
            buffer.div_(torch.from_numpy(np.array(factors)))
            divided = True
    if not divided:
        raise SourceError(f"{file.path}: tensor {_ROPE_FACTORS} of shape {factors.shape} fits no rotary frequencies")
