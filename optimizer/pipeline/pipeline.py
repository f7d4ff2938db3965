"""The passes of an export, in order. This is the whole list of ours; a recipe may name passes of other packages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from enginewright.passes.attention.absorb_latent import AbsorbLatent
from enginewright.passes.attention.group_kv_heads import GroupKvHeads
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.cleanup.fold_constants import FoldConstants
from enginewright.passes.cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from enginewright.passes.cleanup.remove_dead_code import RemoveDeadCode
from enginewright.passes.cleanup.remove_noops import RemoveNoops
from enginewright.passes.experts.lower_experts import LowerExperts
from enginewright.passes.framework.base import Pass
from enginewright.passes.fusion.fuse_add_norm import FuseAddNorm
from enginewright.passes.fusion.fuse_gate_up import FuseGateUp
from enginewright.passes.fusion.fuse_qkv import FuseQkv
from enginewright.passes.fusion.sink_take_rows import SinkTakeRows
from enginewright.passes.normalize.normalize_activation import NormalizeActivation
from enginewright.passes.normalize.normalize_complex import NormalizeComplex
from enginewright.passes.normalize.normalize_embedding import NormalizeEmbedding
from enginewright.passes.normalize.normalize_gated_activation import NormalizeGatedActivation
from enginewright.passes.normalize.normalize_linear import NormalizeLinear
from enginewright.passes.normalize.normalize_norm import NormalizeNorm
from enginewright.passes.normalize.normalize_repeats import NormalizeRepeats
from enginewright.passes.normalize.normalize_rope import NormalizeRope
from enginewright.passes.normalize.normalize_slice_writes import NormalizeSliceWrites
from enginewright.passes.normalize.normalize_spellings import NormalizeSpellings
from enginewright.passes.normalize.sink_views import SinkViews
from enginewright.passes.quantization.apply_awq import ApplyAwq
from enginewright.passes.quantization.apply_gptq import ApplyGptq
from enginewright.passes.quantization.cast_weights_to_bf16 import CastWeightsToBf16
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.passes.quantization.quantize_embeddings import QuantizeEmbeddings
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.passes.quantization.rotate_values import RotateValues
from enginewright.passes.quantization.round_weights import RoundWeights
from enginewright.passes.quantization.smooth_activations import SmoothActivations
from enginewright.passes.recovery.load_recovered import LoadRecovered
from enginewright.passes.recurrence.lower_recurrence import LowerRecurrence
from enginewright.passes.sparsity.drop_layers import DropLayers
from enginewright.passes.sparsity.prune_channels import PruneChannels
from enginewright.passes.sparsity.prune_heads import PruneHeads
from enginewright.passes.sparsity.select_sparsity_mask import SelectSparsityMask
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.extensions import Extensible

OPTIONAL = frozenset({"absorb_latent", "fuse_qkv", "fuse_gate_up", "fuse_add_norm", "sink_take_rows"})
"""The passes, besides those of targets, that a recipe may turn off.

Without any other one, the program can't be lowered.
"""


OF_CACHES = frozenset({"absorb_latent", "group_kv_heads", "lower_recurrence", "lower_attention"})
"""The passes for programs with caches. A program that computes whole texts keeps attention as captured."""

EXTENSIONS = Extensible[type[Pass]]({}, "enginewright.passes", type)
"""Passes of other packages. If a recipe turns one on, it runs after the pass that its ``after`` names."""


def default_pipeline() -> list[Pass]:
    """Returns the passes that turn a captured program into a program with caches, in order."""
    return [
        # 1. The graph as torch.export gives it, without what says nothing.
        NormalizeSliceWrites(),
        NormalizeComplex(),
        NormalizeSpellings(),
        RemoveNoops(),
        RemoveDeadCode(),
        # 2. [1, T, ...] becomes [T, ...] and [1, N, T, D] becomes [T, N, D]; then every spelling the one ew op that
        # means it. What is constant is folded first (a norm's 1 + weight), and values that are one are made one node.
        SinkViews(),
        FoldConstants(),
        RemoveNoops(),
        MergeCommonSubexpressions(),
        NormalizeLinear(),
        NormalizeEmbedding(),
        NormalizeNorm(),
        NormalizeRope(),
        NormalizeRepeats(),
        NormalizeActivation(),
        NormalizeGatedActivation(),
        # 3. What the rewrites left over.
        RemoveNoops(),
        MergeCommonSubexpressions(),
        RemoveDeadCode(),
        # What the recipe takes out of the model: layers, heads, groups of heads, channels. Passes that it has no work
        # for aren't run.
        DropLayers(),
        PruneHeads(),
        GroupKvHeads(),
        PruneChannels(),
        # Weights that training has recovered, in the shapes that the passes above leave.
        LoadRecovered(),
        # Keys and values that are linear in a latent vector are no longer computed: attention is over the vector.
        AbsorbLatent(),
        # 4. Fewer and larger ops. take_rows sinks before add and norm are fused, so that the last block's move too.
        FuseQkv(),
        FuseGateUp(),
        SinkTakeRows(),
        FuseAddNorm(),
        # 5. Experts become grouped linears. The paged form: keys, values and
        # states go to a cache, attention and recurrences read them there.
        LowerExperts(),
        LowerRecurrence(),
        LowerAttention(),
        # 6. The formats of weights, as the recipe has them, and what they are multiplied with. Fused linears are one.
        # Passes that look at calibration tokens say how channels are scaled, which weights a sparse format keeps, and
        # which integers are best.
        ChooseFormats(),
        RotateValues(),
        SmoothActivations(),
        SelectSparsityMask(),
        ApplyAwq(),
        ApplyGptq(),
        QuantizeLinears(),
        QuantizeEmbeddings(),
        RoundWeights(),
        CastWeightsToBf16(),
        # 7. What that left over.
        RemoveNoops(),
        MergeCommonSubexpressions(),
        RemoveDeadCode(),
    ]


def choose_passes(switches: dict[str, bool], *, caches: bool = True) -> tuple[list[Pass], frozenset[str]]:
    """Returns the passes that a recipe doesn't turn off, and the names of passes that must match something.

    Args:
        switches: the recipe's ``passes`` table, whose names ``export`` has checked.
        caches: False leaves out the passes for caches.

    Passes of other packages are inserted. Raises PassError if one should run after a pass that isn't in the pipeline.
    """
    passes = [p for p in left_on(default_pipeline(), switches) if caches or p.name not in OF_CACHES]
    for name in sorted(name for name, on in switches.items() if on and name in EXTENSIONS):
        added = EXTENSIONS[name]()
        places = [i for i, p in enumerate(passes) if p.name == added.after]
        if not places:
            raise PassError(
                f"the pass {name} is to run after {added.after!r}, and there is no such pass",
                hint="Its class attribute `after` names a pass of the pipeline; see `optimize report --verbose`.",
            )
        passes.insert(places[-1] + 1, added)
    return passes, frozenset(name for name, on in switches.items() if on)


def left_on(passes: Sequence[Pass], switches: dict[str, bool]) -> list[Pass]:
    """Returns the passes of a list that a recipe's ``passes`` table doesn't turn off."""
    return [p for p in passes if switches.get(p.name, True)]


def split_before(passes: Sequence[Pass], *names: str) -> tuple[list[Pass], list[Pass]]:
    """Splits a list before the first pass with one of these names; returns both parts."""
    before = list(takewhile(lambda p: p.name not in names, passes))
    return before, list(passes[len(before) :])
