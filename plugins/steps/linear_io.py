"""The linear form of a step: the inputs and outputs of a bundle's ONNX file, and the ``io`` section of a target's
manifest.

B requests of S tokens each, N = B*S. A request's cache is one slot of C contiguous tokens, at the request's index in
the batch. R rows of logits are computed. The sizes B, S, C and R may differ between steps.

Unused rows write to the last of a slot's C positions. So a request has at most C - 1 tokens, and a file for slots of
one fixed size serves a context of one token less.

    input_ids        i64 [B, S]
    position_ids     i64 [B, S]
    write_index      i64 [B]            position in the slot of a request's first token of this step
    MASK             bool [B, 1, S, C]  one for each window: True where the key may be attended to
    rows             i64 [R]            indices into the N tokens
    past_key_L       [B, Nkv, C, D]     for each layer L of a cache group
    past_value_L     [B, Nkv, C, Dv]

    logits           f32 [R, V]
    present_key_L    as past_key_L, and may share its memory
    present_value_L  as past_value_L

The contrib and kernels variants have the same inputs and outputs, but no mask where GroupQueryAttention attends. In
these, requests with more than one token each can run together only if all begin at position 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import CacheGroup, CacheGroupShape
from enginewright.runtime.shared.kv_formats import CacheDtype
from enginewright.runtime.shared.records import Count, Positive, Record

MODEL_FILE = "model.onnx"
"""The file of the standard variant, at the bundle's root, because external data must be in its folder or below."""

CONTRIB_FILE = "model.contrib.onnx"
KERNELS_FILE = "model.kernels.onnx"
NARROW_FILE = "model.{}.onnx"
"""The pattern for the name of the 16-bit variant's file, at the bundle's root; {} is the type."""

NarrowFloats = Literal["f16", "bf16"]
Variant = Literal["standard", "contrib", "kernels"] | NarrowFloats
AccuracyLevel = Literal[1, 4]

INPUT_IDS, POSITION_IDS, WRITE_INDEX, ROWS, LOGITS = "input_ids", "position_ids", "write_index", "rows", "logits"


class LinearCacheGroup(CacheGroupShape, frozen=True, kw_only=True):
    """A cache group whose caches are contiguous. ``mask`` is the name of the mask that its layers read."""

    mask: str

    @classmethod
    def from_group(cls, group: CacheGroup, dtype: CacheDtype = "f32") -> LinearCacheGroup:
        """Returns a program's cache group in the linear form, with caches of ``dtype``."""
        shape = group.model_dump(exclude={"block_size"}) | {"dtype": dtype}
        return cls(**shape, mask=mask_name(group.window))

    def to_group(self, block_size: int) -> CacheGroup:
        """Returns the group as the scheduler's ``CacheGroup``: a slot of ``block_size`` contiguous tokens counts as one
        block.
        """
        return CacheGroup(**self.model_dump(exclude={"mask"}), block_size=block_size)


class VariantFile(Record, frozen=True, kw_only=True):
    """A variant's file: the graph with onnxruntime's own operators, or with ours too.

    Attributes:
        file: the file's path in the bundle; "" if it would equal the standard file.
        standard: the attentions that keep standard operators, each with the reason.
        accuracy_level: see ``LinearIo``.
    """

    file: str
    standard: tuple[str, ...] = ()
    accuracy_level: AccuracyLevel = 1


class NarrowFile(Record, frozen=True, kw_only=True):
    """The file of the 16-bit variant: standard operators with floats and caches of ``dtype``, for GPUs."""

    file: str
    dtype: NarrowFloats


class LinearIo(Record, frozen=True, kw_only=True):
    """A target's section for the linear form: its files, and facts that running a step needs.

    Attributes:
        file: the path in the bundle of the file to run; "" if it was built into engines and removed.
        opset: the version of the standard operators in it.
        onnxruntime: the smallest version that runs it.
        variant: the kind of ``file``: "standard" has only standard operators, "contrib" also onnxruntime's own,
            "kernels" also those of the library ``plugins/onnx/kernels``.
        contrib, kernels: the variants next to a standard file; None if they weren't requested.
        narrow: the 16-bit variant next to it; None if it wasn't requested.
        accuracy_level: how onnxruntime computes products with 4-bit weights (MatMulNBits): 1 multiplies floats, 4
            rounds activations to 8 bits, in the groups of the weight.
        cache_groups: the cache groups in the program's order.
        summed_products: the number of products summed on the way to a logit, which bounds the rounding error.
    """

    file: str = MODEL_FILE
    opset: Positive
    onnxruntime: str
    variant: Variant = "standard"
    contrib: VariantFile | None = None
    kernels: VariantFile | None = None
    narrow: NarrowFile | None = None
    accuracy_level: AccuracyLevel = 1
    cache_groups: tuple[LinearCacheGroup, ...]
    summed_products: Count

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that the target has, ordered by their speed on a CPU, the fastest last."""
        narrow: tuple[Variant, ...] = () if self.narrow is None else (self.narrow.dtype,)
        beside = (name for name, beside in self._beside.items() if beside is not None and beside.file)
        return (*narrow, self.variant, *beside)

    def fastest(self, *, operators: bool) -> Variant:
        """Returns the variant that is fastest on a CPU. ``operators``: True if the library that "kernels" needs is
        installed.
        """
        return next((v for v in reversed(self.variants) if v != "kernels" or operators), self.variant)

    @property
    def _beside(self) -> dict[Variant, VariantFile | None]:
        return {"contrib": self.contrib, "kernels": self.kernels}

    def of_variant(self, variant: Variant) -> LinearIo:
        """Returns this section with the file of one of ``variants``."""
        if variant == self.variant:
            return self
        if self.narrow is not None and variant == self.narrow.dtype:
            groups = tuple(group.model_copy(update={"dtype": variant}) for group in self.cache_groups)
            update = {"variant": variant, "file": self.narrow.file, "cache_groups": groups}
            return self.model_copy(update=update | {"contrib": None, "kernels": None, "narrow": None})
        file = self._beside[variant]
        assert file is not None
        fields = {"file": file.file, "accuracy_level": file.accuracy_level}
        return self.model_copy(update={"variant": variant, "contrib": None, "kernels": None, "narrow": None, **fields})


def mask_name(window: int) -> str:
    """Returns the name of the mask for layers with a window of ``window`` tokens; 0 means no window."""
    return f"mask_w{window}" if window else "mask"


def cache_names(layer: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns the names of a layer's caches: (past, present) of the keys, and (past, present) of the values."""
    key, value = ((f"past_{kind}_{layer}", f"present_{kind}_{layer}") for kind in ("key", "value"))
    return key, value


def linear_io(bundle: Bundle, target: str) -> LinearIo:
    """Returns the inputs and outputs of a target's steps. Raises BundleError if the target is missing, not ready, or of
    another form."""
    return bundle.section(target, LinearIo, "description of its steps")


def made_with(target: TargetManifest) -> Iterator[tuple[str, str]]:
    """Yields the package that a target of this form was written for: onnxruntime and the oldest version that runs it.

    ``optimize sbom`` lists it. Nothing is yielded for a target without this form.
    """
    if (io := target.section(LinearIo)) is not None:
        yield "onnxruntime", io.onnxruntime
