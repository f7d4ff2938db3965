"""The cuda target's steps beside the evaluation of the same program; run where Triton interprets its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginewright.optimizer.capture import capture
from enginewright.optimizer.pipeline.pass_context import pass_context
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.recipes.recipe import load_recipe, with_cache
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import Lowering
from enginewright.passes.quantization.dequantize_products import DequantizeProducts
from enginewright.plugins.cuda.compile.emitter import CudaEmitter, lower_for_gpus
from enginewright.plugins.cuda.serve.ops import Launcher
from enginewright.plugins.cuda.serve.program import CudaProgram, Place, weight_tensor
from enginewright.plugins.cuda.serve.steps import CudaSteps
from enginewright.plugins.emit.weights import stored_chunks
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.graphed_steps import Capture
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.tiles import GPUS, FloatType
from enginewright.plugins.steps.packed_steps import StepLimits
from enginewright.runtime.shared.contracts import SamplingBatch, StepInput
from enginewright.runtime.shared.kv_formats import ROTATED_CACHES
from enginewright.runtime.shared.lowered_program import LoweredProgram
from tests.acceptance.test_families import MORE_FAMILIES
from tests.acceptance.test_families_experts import EXPERT_FAMILIES, make
from tests.acceptance.tiny_configs import tiny_family
from tests.conftest import make_tiny_model
from tests.families import RECURRENT
from tests.passes import small_programs
from tests.passes.small_programs import PagedEvaluation, random_sequences

EXACT = 1e-5
"""The share of the largest logit, where all is float32: sums in another order. Measured: 2.6e-6 at most."""

ROUNDED = 20 * 2.0**-9
"""The share with bf16 activations: some 20 roundings on the way to a logit, of half a unit in the last place each."""

BLOCKS = 24
SIZES: Mapping[str, Mapping[str, Any]] = {"kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 32}}
"""Fields that make the layers of a family smaller, for which the interpreter would take minutes."""
CPU = torch.device("cpu")


def program_of(case: str, recipe: str = "f32", cache: str | None = None) -> tuple[Program, PassContext]:
    """A tiny model of a family's case after all passes but the target's, and what they were given."""
    if case in RECURRENT:
        model = tiny_family(case, **SIZES.get(case, {}))
    elif case in EXPERT_FAMILIES:
        model = make(make_tiny_model, case)
    else:
        model = make_tiny_model(case.partition(" ")[0], **MORE_FAMILIES.get(case, {}))
    program = capture(model).program
    loaded = load_recipe(recipe)
    loaded = loaded.model_copy(
        update={"weights": loaded.weights.model_copy(update={"smooth": False})}
    )  # no calibration
    if cache is not None:
        loaded = with_cache(loaded, cache)
    context = pass_context(loaded, frozenset(), (), scratch=None, progress=lambda event: None, targets=("cuda",))
    PassManager([p for p in default_pipeline() if p.wanted(context)], context).run(program)
    return program, context


def lowered(program: Program, context: PassContext, floats: FloatType) -> Lowering:
    """The program that the emitter writes, read again as the runtime reads it."""
    program = program.copy()
    PassManager([p for p in CudaEmitter().passes() if p.wanted(context)], context).run(program)
    lowering = lower_for_gpus(program, floats)
    return Lowering(LoweredProgram.from_json(lowering.program.to_json()), lowering.weights)


def weights_of(lowering: Lowering, device: torch.device = CPU) -> dict[str, Tensor]:
    tensors = {}
    for use in lowering.program.weights:
        stored = np.concatenate([chunk.reshape(-1) for chunk in stored_chunks(use, lowering.weights[use.name])])
        shape = use.shape if use.layout == "rows" else (-1,)
        tensors[use.name] = weight_tensor(use, stored.reshape(shape), device)
    return tensors


def steps_of(
    lowering: Lowering,
    vocab: int,
    capture_graph: Capture | None = None,
    launcher: Launcher | None = None,
    blocks: int = BLOCKS,
    rows: int = 128,
    requests: int = 8,
    exact: bool = False,
) -> CudaSteps:
    launcher = JitLauncher() if launcher is None else launcher
    program = CudaProgram(
        lowering.program,
        weights_of(lowering),
        Place(CPU, GPUS[80], launcher),
        blocks={group.name: blocks for group in lowering.program.cache_groups},
        limits=StepLimits(tokens=128, requests=requests, rows=rows, blocks=48),
        exact=exact,
    )
    poison(program.arena)
    return CudaSteps(program, vocab, launcher, capture_graph)


def poison(memory: Tensor) -> None:
    """NaN, in whatever float type it is read; as integers, far out of any range."""
    memory.fill_(0xFF)


def step_input(inputs: Mapping[str, Tensor], sampling: SamplingBatch | None = None) -> StepInput:
    """The inputs of ``Steps`` as executors take them; a step without sampling returns logits."""
    arrays = {name: value.to(torch.int32).numpy() for name, value in inputs.items()}
    plain = {name: arrays[name] for name in ("ids", "positions", "q_start", "kv_len", "rows")}
    tables = {name.partition(":")[2]: a for name, a in arrays.items() if name.startswith("block_table:")}
    slots = {name.partition(":")[2]: a for name, a in arrays.items() if name.startswith("slots:")}
    without_sampling = sampling is None
    return StepInput(
        **plain, block_table=tables, slots=slots, sampling=sampling, outputs=("logits",) if without_sampling else ()
    )


def round_caches(program: Program, context: PassContext) -> None:
    """Rounds what a program writes to its caches as the recipe says; a float cache keeps all bits."""
    if context.recipe.cache in ROTATED_CACHES:  # of which one has a second cache
        RoundKvCache().run(program, context)
        return
    dtype = context.recipe.cache if context.recipe.cache in ("i8", "fp8") else "f32"
    for node in program.nodes_of(torch.ops.ew.kv_write.default):
        node.args = (*node.args[:5], dtype, *node.args[6:])


def long_contexts(case: str, length: int, cache: str | None = None, given: bool = False) -> float:
    """The largest difference of a logit of decode steps over contexts of several parts, as a share of the largest.

    ``given``: the long prompt's keys and values are the evaluation's, which has them in a moment.
    """
    program, context = program_of(case, cache=cache)
    worst = 0.0
    lowering, meant = lowered(program, context, "f32"), program.copy()
    round_caches(meant, context)
    evaluation, steps = PagedEvaluation(meant, 48), steps_of(lowering, 256, blocks=48)
    stepper = small_programs.steps_of(lowering.program.cache_groups, 48)
    a, b, c = random_sequences((length, 60, 3), 250)
    for start in range(0, length - 1, 120):
        chunk = {"a": a[start : min(start + 120, length - 1)]}
        evaluation.run(chunk)
        step = step_input(stepper.step(chunk))
        if not given:
            steps.start(step).result()
    for name, held in steps._program.caches.items() if given else ():
        for ours, kind in ((held.of.keys, "k"), (held.of.values, "v")):
            ours.copy_(evaluation.caches[f"{kind}_cache:{name.partition('/')[2]}"].nan_to_num())
    for chunks in ({"b": b[:59], "c": c[:1]}, {"a": a[-1:], "b": b[59:], "c": c[1:2]}):
        expected = evaluation.run(chunks)
        logits = steps.start(step_input(stepper.step(chunks))).result().logits
        assert logits is not None
        worst = max(worst, float(np.abs(logits - expected.numpy()).max() / expected.abs().max()))
    return worst


def schedule(vocab: int = 250) -> list[dict[str, list[int]]]:
    """Prompts whole and in chunks, decodes beside them, decodes alone."""
    a, b, c, d = random_sequences((35, 4, 11, 5), vocab)
    return [
        {"a": a[:19], "c": c[:3]},
        {"c": c[3:9], "a": a[19:32]},
        {"a": a[32:33], "b": b[:2], "c": c[9:10], "d": d[:3]},  # a's second block
        {"a": a[33:34], "b": b[2:3], "c": c[10:11], "d": d[3:4]},
        {"a": a[34:], "b": b[3:], "d": d[4:]},
    ]


def differences(
    case: str, recipe: str = "f32", floats: FloatType = "f32", cache: str | None = None
) -> list[tuple[float, float]]:
    """Gives for each step of ``schedule`` the largest difference of a logit, and the largest logit."""
    program, context = program_of(case, recipe, cache)
    lowering = lowered(program, context, floats)
    meant = program.copy()
    DequantizeProducts().run(meant, context)
    round_caches(meant, context)
    evaluation = PagedEvaluation(meant, BLOCKS)
    steps, stepper = steps_of(lowering, 256), small_programs.steps_of(lowering.program.cache_groups, BLOCKS)
    apart = []
    for chunks in schedule():
        expected = evaluation.run(chunks)
        logits = steps.start(step_input(stepper.step(chunks))).result().logits
        assert logits is not None
        apart.append((float(np.abs(logits - expected.numpy()).max()), float(expected.abs().max())))
    return apart


def greedy(rows: int) -> SamplingBatch:
    """Options that take each row's greatest logit."""
    floats, integers = np.zeros(rows, np.float32), np.zeros(rows, np.uint64)
    return SamplingBatch(floats, np.zeros(rows, np.int32), floats + 1, floats, integers, integers)


def as_options(values: Sequence[Mapping[str, Any]]) -> SamplingBatch:
    """Rows of options by name; what a row doesn't name is off."""
    kinds = {"top_k": np.int32, "seed": np.uint64, "counter": np.uint64}
    off = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "counter": 0}
    return SamplingBatch(
        **{n: np.array([v.get(n, d) for v in values], kinds.get(n, np.float32)) for n, d in off.items()}
    )


class Devices(JitLauncher):
    """Launches nothing, and looks at where the arguments of calls are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.calls = device, 0

    def bind(self, call: Call) -> Callable[[], object]:
        call.spec(90)

        def run() -> None:
            self.calls += 1
            for name, value in call.arguments.items():
                assert not isinstance(value, torch.Tensor) or value.device == self.device, f"{call.kernel}: {name}"

        return run
