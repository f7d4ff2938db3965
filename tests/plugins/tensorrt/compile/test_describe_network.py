from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.optimizer.verify.random_tokens import tolerance_of
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.tensorrt.compile.network import Network
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, UnsupportedModelError
from tests.acceptance.tiny_configs import tiny_family
from tests.conftest import make_tiny_model
from tests.plugins.graphs.linear_session import PLAN, SEQUENCES, lowered, reference_logits, tokens_of
from tests.plugins.tensorrt.compile.conftest import MakeBundle
from tests.plugins.tensorrt.compile.evaluate_network import evaluator

aten = torch.ops.aten
BLOCKS = 4


def opened(folder: Path) -> tuple[Bundle, Network]:
    bundle = Bundle.open(folder)
    name = "targets/tensorrt/network.json"
    return bundle, Network.from_json(bundle.read_bytes(name), source=name)


def run_plan(bundle: Bundle, network: Network) -> dict[int, np.ndarray]:  # type: ignore[type-arg]
    """Logits after each token of the requests of ``linear_session``: ragged prefill, a second one, decode steps."""
    section = bundle.targets["tensorrt"].section(TensorRtSection)
    assert section is not None and section.paged is not None
    run = evaluator(network, bundle)
    dtype = {"f32": np.float32, "f16": np.float16}[network.dtype]
    caches = {}
    for name, tensor_input in network.inputs.items():
        if "_cache:" in name:
            caches[name] = np.full([BLOCKS if s == "P" else int(s) for s in tensor_input.shape], 3.0, dtype)
    requests = list(SEQUENCES)
    done = dict.fromkeys(requests, 0)
    table = np.asarray([[2, -1], [1, -1]], np.int32)  # each has a block, in no order
    logits: dict[int, list[np.ndarray]] = {r: [] for r in requests}  # type: ignore[type-arg]
    for counts in PLAN:
        work = [(r, counts[r]) for r in requests]
        ids = np.concatenate([tokens_of(r)[done[r] : done[r] + n] for r, n in work]).astype(np.int32)
        positions = np.concatenate([np.arange(done[r], done[r] + n) for r, n in work]).astype(np.int32)
        starts = np.cumsum([0, *(n for _, n in work)]).astype(np.int32)
        slots = np.concatenate([table[i, 0] * 32 + np.arange(done[r], done[r] + n) for i, (r, n) in enumerate(work)])
        feeds = {"ids": ids, "positions": positions, "q_start": starts, "rows": np.arange(len(ids), dtype=np.int32)}
        feeds["kv_len"] = np.asarray([done[r] + n for r, n in work], np.int32)
        for group in section.paged.cache_groups:
            feeds[f"slots:{group.name}"], feeds[f"block_table:{group.name}"] = slots.astype(np.int32), table
        feeds_of_network = {name: value for name, value in {**feeds, **caches}.items() if name in network.inputs}
        results = dict(zip(network.outputs, run.run(None, feeds_of_network), strict=True))
        caches = {name: results[name.replace("_cache:", "_cache_written:")] for name in caches}
        for i, (r, n) in enumerate(work):
            logits[r].append(results["logits"][starts[i] : starts[i + 1]])
            done[r] += n
    return {r: np.concatenate(parts) for r, parts in logits.items()}


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "gpt_oss", "deepseek_v3"])
def test_the_description_computes_what_transformers_does(family: str, make_bundle: MakeBundle) -> None:
    model = tiny_family(family)
    bundle, network = opened(make_bundle(lowered(model), "f32"))
    section = bundle.targets["tensorrt"].section(TensorRtSection)
    assert section is not None and section.paged is not None
    expected = reference_logits(model)
    largest = max(float(np.abs(logits).max()) for logits in expected.values())
    for request, logits in run_plan(bundle, network).items():
        atol = tolerance_of(section.paged.summed_products) * largest
        np.testing.assert_allclose(logits, expected[request], rtol=0, atol=atol)


@pytest.mark.parametrize("hidden", [64, 96])
def test_in_16_bits_it_is_as_far_as_16_bits_are(hidden: int, make_bundle: MakeBundle) -> None:
    model = make_tiny_model("Llama", hidden_size=hidden)
    bundle, network = opened(make_bundle(lowered(model), "f16"))
    assert {w.dtype for n, w in network.weights.items() if len(w.shape) == 2} == {"f16"}
    expected = reference_logits(model)
    largest = max(float(np.abs(logits).max()) for logits in expected.values())
    for request, logits in run_plan(bundle, network).items():
        assert logits.dtype == np.float32
        error = float(np.abs(logits - expected[request]).max())
        # A value that is rounded to 11 bits is off by 2**-12 of itself at most; some dozens follow each other.
        assert 0 < error <= 64 * 2**-12 * largest


def test_the_same_program_gives_the_same_network(make_bundle: MakeBundle) -> None:
    program = lowered(tiny_family("llama"))
    folders = [make_bundle(program, name=name) for name in ("a", "b")]
    assert len({(folder / "targets/tensorrt/network.json").read_bytes() for folder in folders}) == 1
    assert len({(folder / "weights/weights-00000.bin").read_bytes() for folder in folders}) == 1
    network = opened(folders[0])[1]
    assert network.inputs.keys() >= {"ids", "positions", "q_start", "kv_len", "slots:full", "k_cache:0", "v_cache:1"}
    assert set(network.outputs) == {"logits", *(f"{c}_cache_written:{i}" for c in "kv" for i in (0, 1))}
    attends = [call for call in network.calls if call.op == "ew.paged_attention"]
    assert [call.attributes["scale"] for call in attends] == [0.25, 0.25]
    assert all(call.name.startswith(f"model.layers.{i}.self_attn") for i, call in enumerate(attends))


def test_what_no_operator_expresses_is_refused_by_name(make_bundle: MakeBundle) -> None:
    program = lowered(tiny_family("llama"))
    logits = program.logits
    with program.inserting_before(program.output):
        summed = program.call(aten.cumsum.default, logits, -1, where=("lm_head",))
    program.output.args = ((summed,),)
    with pytest.raises(UnsupportedModelError, match=r"aten.cumsum at lm_head: (.|\n)*tensorrt target"):
        make_bundle(program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n["calls"][3]["inputs"].__setitem__(0, "nowhere"), "calls.3: .* reads 'nowhere', which nothing"),
        (lambda n: n["outputs"].append("more"), "outputs: nothing gives 'more'"),
        (lambda n: n.update(format_version=9), "format_version is 9, and .* reads up to 1"),
        (lambda n: n.update(dtype="f8"), "dtype: "),
    ],
)
def test_a_damaged_network_is_refused(change: object, message: str, make_bundle: MakeBundle) -> None:
    _, network = opened(make_bundle(lowered(tiny_family("llama"))))
    data = json.loads(network.to_json())
    assert callable(change)
    change(data)
    with pytest.raises(BundleError, match=f"x.json: {message}"):
        Network.from_json(json.dumps(data), source="x.json")
