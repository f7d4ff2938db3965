"""Fixtures of all tests: the real model (fetched and exported once, whatever the number of workers) and tiny ones."""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import typer.testing
from xdist.scheduler import LoadScopeScheduling

from tests.tiers import TIERS, left_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginewright.passes.ir.program import Program
    from enginewright.passes.ir.weights import WeightExpr

REPOSITORY = Path(__file__).resolve().parent.parent

PIECES = {"test_families_table.py": 12, "test_families_experts.py": 4, "test_families.py": 4}
"""Files that are worth running on several workers."""

BY_FAMILY = frozenset({"test_emit_model.py", "test_segments_table.py", "test_whole_table.py"})
"""Files whose cases begin with a family's lowered program: one worker has a family of all, and captures it once."""

TOGETHER = frozenset({"test_formats.py", "test_greedy.py", "test_invariance.py"})
"""Files of acceptance/ that begin by exporting the real model: one worker would wait for the other."""

FIRST = (*sorted(TOGETHER), "test_packaging.py", "test_large_model.py", "test_examples.py", "test_recipes.py")
"""Files that begin: whole ones that take minutes, which at the end would keep one worker busy and the other waiting."""

TINY_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Gemma2", "Mistral", "GPT2", "Phi3", "GPTNeoX")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` writes tests/golden, or tables of docs, anew from what comes out now."""
    parser.addoption("--update-golden", action="store_true", default=False, help="rewrite what tests compare with")
    parser.addoption("--results", metavar="FILE", type=Path, help="write each file's counts and seconds as JSON")


def pytest_configure() -> None:
    """Sets up the environment of the tests, and of the commands that they run.

    No test asks the real Hub. A shell that starts the tests in the background makes them ignore Ctrl-C. Parallel
    workers have one torch thread each, since more threads than cores wait for one another.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    # A thousand tests run a command, and each would make all commands anew, in 40 ms.
    typer.testing._get_command = functools.cache(typer.main.get_command)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Excludes the objects that are loaded by now (torch, transformers, the tests) from garbage collection.

    Python's collector looks through them again and again, which takes a third of the tests' time. New objects needn't
    be looked through every 700 objects either. As Python exits, nanobind looks for objects that the collector left, so
    they are unfrozen then, after pytest's own five collections.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.set_threshold(20_000, 20, 20)


class _TracedOnce:
    """torch.export's trace of a model, made once for all tests of a worker that capture the same one.

    A capture of a tiny model is half of its export. The key is all that a trace depends on: the configuration, each
    module's class and its forward, and the parameters' and buffers' names, shapes, types and (of buffers) values. What
    is under test is not taken from here: tests of capture itself, and of whole families, trace each time.
    """

    EXEMPT = ("tests/optimizer/capture/", "tests/acceptance/test_families")

    def __init__(self, trace: Callable[..., Program]) -> None:
        self.trace = trace
        self.enabled = True
        self._kept: dict[object, Program] = {}
        self._forwards: list[object] = []  # so that no other function gets the id of one in a key

    def __call__(self, model: PreTrainedModel, weights: Mapping[str, WeightExpr]) -> Program:
        key = self._key(model) if self.enabled else None
        if key is None:
            return self.trace(model, weights)
        if key not in self._kept:
            self._kept[key] = self.trace(model, weights)
        program = self._kept[key].copy()
        for name in program.weights:
            if name in weights:
                program.weights.change(name, weights[name])
        return program

    def _key(self, model: PreTrainedModel) -> object | None:
        modules = list(model.named_modules(remove_duplicate=False))
        if any("forward" in vars(module) for _, module in modules):
            return None
        forwards = [type(module).forward for _, module in modules]
        self._forwards += forwards
        parameters = [(n, id(p), p.shape, p.dtype) for n, p in model.named_parameters(remove_duplicate=False)]
        first: dict[int, int] = {}  # which are tied
        tied = [(n, first.setdefault(i, len(first)), shape, dtype) for n, i, shape, dtype in parameters]
        buffers = [
            (n, b.shape, b.dtype, None if b.is_meta else zlib.crc32(b.detach().float().numpy().tobytes()))
            for n, b in model.named_buffers()
        ]
        classes = [(n, type(m), id(f)) for (n, m), f in zip(modules, forwards, strict=True)]
        return (model.config.to_json_string(use_diff=False), *map(tuple, (classes, tied, buffers)))


_traced: list[_TracedOnce] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Captures share their traces, once something is loaded that captures."""
    module = sys.modules.get("enginewright.optimizer.capture.capture_model")
    if module is not None and not _traced:
        _traced.append(_TracedOnce(module.trace))
        module.trace = _traced[0]  # type: ignore[attr-defined]
    for traced in _traced:
        traced.enabled = not item.nodeid.startswith(_TracedOnce.EXEMPT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Writes what ``--results`` asks for: of each file how many tests had which outcome, and their seconds in all."""
    if (target := config.getoption("--results")) is None:
        return
    files: dict[str, dict[str, float]] = {}
    for outcome, reports in terminalreporter.stats.items():
        for report in (report for report in reports if isinstance(report, pytest.TestReport)):
            file = files.setdefault(report.nodeid.partition("::")[0], {"seconds": 0.0})
            file["seconds"] = round(file["seconds"] + report.duration, 1)
            if outcome:  # what isn't a test's own outcome (setup and teardown that passed) has none
                file[outcome] = file.get(outcome, 0) + 1
    outcomes = sorted({key for file in files.values() for key in file} - {"seconds"})
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True)
    result: dict[str, object] = {"commit": commit.stdout.strip(), "cores": os.cpu_count()}
    result["command"] = " ".join(["pytest", *config.invocation_params.args])
    result["seconds"] = round(time.time() - terminalreporter._session_start.time, 1)
    result |= {outcome: sum(file.get(outcome, 0) for file in files.values()) for outcome in outcomes}
    result["files"] = dict(sorted(files.items()))
    target.write_text(json.dumps(result, indent=1) + "\n")


class _FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests run on one worker, which makes its fixtures once; the longest files come in pieces."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if Path(file).name in TOGETHER:
            return "the real model"
        if Path(file).name in BY_FAMILY and "[" in nodeid:
            return f"families-{zlib.crc32(nodeid.partition('[')[2].encode()) % 12}"
        return f"{file}-{zlib.crc32(nodeid.encode()) % PIECES.get(Path(file).name, 1)}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """``--dist loadfile``, as the Makefile has it: files in the order of ``pytest_collection_modifyitems``."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would have the files of one long test come last
    return _FileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what the quick tiers leave out, before ``-m`` looks at marks; puts the files of FIRST before the others."""
    begun: set[str] = set()
    for item in items:
        test, case = item.nodeid.partition("[")[::2]
        fits = [name for name in TIERS if test.startswith(name)]
        if not fits:
            continue
        mark = left_out(*TIERS[max(fits, key=len)], case, first=test not in begun)
        begun.add(test)
        if mark is not None and item.get_closest_marker("soak") is None:
            item.add_marker(mark)
    order = {name: i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return REPOSITORY


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Held by one process at a time."""
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A temporary folder of this test run that all xdist workers see."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def fetch_model() -> ModuleType:
    """examples/fetch_model.py as a module."""
    spec = importlib.util.spec_from_file_location("fetch_model", REPOSITORY / "examples" / "fetch_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2_gguf(fetch_model: ModuleType) -> Path:
    """SmolLM2-135M-Instruct as a GGUF of Q4_1 blocks, downloaded into the user's cache on first use."""
    path: Path = fetch_model.fetch("smollm2")
    return path


@pytest.fixture(scope="session")
def gemma3_gguf(fetch_model: ModuleType) -> Path:
    """Gemma 3 270M (a base model) as a GGUF of K-quants, downloaded into the user's cache on first use."""
    path: Path = fetch_model.fetch("gemma3")
    return path


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path, shared_folder: Path) -> Path:
    """SmolLM2 as an f32 bundle for the cpu target, exported once per test run."""
    from enginewright.optimizer.export import export

    bundle = shared_folder / "smollm2.bundle"
    with _only_one(shared_folder / "smollm2.lock"):
        if not bundle.exists():
            export(smollm2_gguf, bundle, recipe="f32", targets=("cpu",))
    return bundle


def make_tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A random decoder of 2 layers (hidden 64, 4 heads, 2 KV heads, vocabulary 256), the same at every call.

    Norm weights and biases are random too: ones and zeros would hide a weight that is forgotten or applied twice.
    ``overrides`` are fields of the family's configuration.
    """
    import torch
    import transformers

    sizes: dict[str, Any] = {"max_position_embeddings": 512, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1}
    sizes |= {"eos_token_id": 2, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128}
    if family == "GPT2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 256}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    elif family != "GPTNeoX":
        sizes |= {"num_key_value_heads": 2}
    if family in ("Llama", "Qwen3", "Gemma2", "Mistral"):
        sizes |= {"head_dim": 16}
    if family == "Gemma2":  # logits caps, alternating windows, and a scale that is not 1/sqrt(head_dim)
        sizes |= {"sliding_window": 8, "query_pre_attn_scalar": 24}
    elif family == "Mistral":
        sizes |= {"sliding_window": 8}
    config = getattr(transformers, f"{family}Config")(**(sizes | overrides))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(family.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.125)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.2)
            else:
                parameter.copy_(1 + noise * 0.2)
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model("Llama", **config_overrides)``: see make_tiny_model."""
    return make_tiny_model


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(shared_folder: Path) -> Path:
    """A Hugging Face folder: a tiny Llama with a tokenizer of single bytes and a chat template."""
    folder = shared_folder / "tiny-llama"
    with _only_one(shared_folder / "tiny-llama.lock"):
        if not folder.exists():
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers
            from transformers import PreTrainedTokenizerFast

            special = ("<pad>", "<s>", "</s>")
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
            tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **names)
            unfinished = shared_folder / "tiny-llama.unfinished"
            make_tiny_model("Llama", vocab_size=len(vocabulary)).save_pretrained(unfinished)
            fast.save_pretrained(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny_folder: Path, shared_folder: Path) -> Path:
    """``tiny_folder`` as an f32 bundle for the cpu target."""
    from enginewright.optimizer.export import export

    bundle = shared_folder / "tiny-llama.bundle"
    with _only_one(shared_folder / "tiny-llama-bundle.lock"):
        if not bundle.exists():
            export(tiny_folder, bundle, recipe="f32", targets=("cpu",))
    return bundle


@pytest.fixture(scope="session")
def pooled_bundles(shared_folder: Path) -> dict[str, Path]:
    """A tiny encoder's f32 bundle for the cpu target of each kind, a key of ``CLASSES`` in tests/text_models.py."""
    from enginewright.optimizer.export import export
    from tests.text_models import CLASSES, save_text_model

    bundles = {kind: shared_folder / f"tiny-{kind}.bundle" for kind in CLASSES}
    with _only_one(shared_folder / "tiny-encoders.lock"):
        for kind, bundle in bundles.items():
            if not bundle.exists():
                save_text_model(shared_folder / f"tiny-{kind}", kind)
                export(shared_folder / f"tiny-{kind}", bundle, recipe="f32", targets=("cpu",))
    return bundles


@pytest.fixture(params=TINY_FAMILIES)
def tiny_family(request: pytest.FixtureRequest) -> str:
    """Each of the families in turn; for ``tiny_model(tiny_family)``."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread(request: pytest.FixtureRequest) -> None:
    """Workers share the cores: each keeps to one thread of torch, so that results and times are steady."""
    if hasattr(request.config, "workerinput"):
        importlib.import_module("torch").set_num_threads(1)
