"""Makes everything that engines load, once; what can't be made is missing from the comparison, with its reason."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.engines import CAPS, ENGINES, GGUF, STORED, Engine, Format
from peers.install import install, last_error, peers_python
from peers.loading import BENCHMARKS, BUILD, REPOSITORY
from peers.models import MODELS, Model
from peers.pages import write_anew
from peers.processes import Command

PARTS = ("optimizer", "passes", "plugins", "runtime")
SOURCES = ("*.py", "*.toml", "*.cpp", "*.h")

EXPORT = """import json, sys, enginewright
from enginewright.optimizer.recipes.recipe import load_recipe
source, bundle, name, max_kl, options = sys.argv[1:]
recipe = load_recipe(name)
if max_kl:
    recipe = recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"max_kl": float(max_kl)})})
enginewright.export(source, bundle, recipe=recipe, overwrite=True, **json.loads(options))"""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """An engine with a model in a format, ready to run."""

    engine: str
    model: str
    format: Format
    command: Command
    path: Path


@dataclass(frozen=True)
class Missing:
    """A comparison that is left out; ``model`` and ``format`` are empty if it concerns all of them."""

    engine: str
    model: str
    format: str
    reason: str


@dataclass(frozen=True)
class Asked:
    """The models, formats and engines to compare.

    Attributes:
        formats: formats to compare; empty takes those of each model.
        prefix: words before every command.
        keep: True leaves existing bundles unchanged.
        kv_cache: storage type of our keys and values, in place of the recipe's.
        every_format: True also takes formats that the models aren't compared in.
        isa: the instruction set that engines are limited to, of ``CAPS``; None for the machine's best one.
    """

    models: Sequence[str]
    formats: Sequence[Format]
    engines: Sequence[str]
    prefix: tuple[str, ...] = ()
    keep: bool = False
    kv_cache: str | None = None
    every_format: bool = False
    isa: str | None = None

    def formats_of(self, model: str) -> list[Format]:
        """The formats of a model that are compared."""
        its = MODELS[model]
        if not self.formats:
            return list(its.formats)
        return [kind for kind in self.formats if self.every_format or kind in its.formats + its.more]


def prepare(asked: Asked, tell: Tell) -> tuple[list[Contender], list[Missing]]:
    """Installs, makes, converts and exports; ours comes first. Raises CalledProcessError for our own part."""
    BUILD.mkdir(parents=True, exist_ok=True)
    python = peers_python(BUILD / "peers")
    pythons = {engine.name: python if engine.packages else Path(sys.executable) for engine in ENGINES.values()}
    prefix = asked.prefix
    if asked.isa:
        limited = peers_python(BUILD / f"peers-{asked.isa}")
        pythons |= {engine.name: limited for engine in ENGINES.values() if engine.built}
        prefix += ("env", *(f"{name}={value}" for name, value in CAPS[asked.isa].items()))
    missing: list[Missing] = []
    able: list[Engine] = []
    for engine in (ENGINES[name] for name in ENGINES if name in asked.engines):
        if engine.packages:
            tell(f"install {engine.name}")
        if (why := install(engine, pythons[engine.name], asked.isa if engine.built else None)) is None:
            able.append(engine)
        else:
            missing.append(Missing(engine.name, "", "", why))
    contenders = []
    for model in asked.models:
        folder = BUILD / model
        tell(f"make {model}")
        converted = [kind for kind in asked.formats_of(model) if kind in STORED and kind != MODELS[model].stored]
        compared = ["hf", "reference"] if MODELS[model].reference else []
        kinds = [*compared, *(GGUF[kind] for kind in asked.formats_of(model)), *(["f16"] if converted else [])]
        quietly([sys.executable, "-m", "peers.make_models", model, str(folder), "--kinds", *kinds])
        without = {kind: why for kind in converted if (why := _quantized(folder, kind, python)) is not None}
        for kind in asked.formats_of(model):
            for engine in able:
                if kind in without:
                    missing.append(Missing(engine.name, model, kind, without[kind]))
                    continue
                if kind not in engine.formats:
                    missing.append(Missing(engine.name, model, kind, f"it doesn't support the format {kind}"))
                    continue
                tell(f"{engine.name}: {model} {kind}")
                if (why := _model_of(engine, folder, kind, python, asked)) is not None:
                    missing.append(Missing(engine.name, model, kind, why))
                    continue
                contenders.append(
                    Contender(
                        engine.name,
                        model,
                        kind,
                        Command(pythons[engine.name], engine.worker, prefix),
                        folder / engine.path(kind),
                    )
                )
    tell("write the engines' files anew, so that the file cache keeps all in pages of one size")
    for contender in contenders:
        write_anew(contender.path)
    return contenders, missing


def _quantized(folder: Path, kind: Format, python: Path) -> str | None:
    """Has llama.cpp make a file of a type of its own, if it isn't there; the reason if it can't."""
    if (target := folder / f"{kind}.gguf").exists():
        return None
    try:
        quietly([str(python), "-m", "peers.quantize", str(folder / "f16.gguf"), str(target), kind.upper()])
    except subprocess.CalledProcessError as e:
        return f"llama.cpp can't make the file: {last_error(e.stderr)}"
    return None


def _model_of(engine: Engine, folder: Path, kind: Format, python: Path, asked: Asked) -> str | None:
    """Makes what the engine loads, if it isn't there; the reason if it can't be made."""
    target = folder / engine.path(kind)
    if engine.made_by == "export":
        if not (asked.keep and target.exists()):
            source = folder / f"{kind}.gguf" if kind in STORED else source_of(folder)
            recipe = engine.formats[kind].removeprefix("recipe ")
            export(source, target, recipe, asked.kv_cache, MODELS[folder.name])
    elif engine.made_by == "convert" and not target.exists():
        try:
            quietly([str(python), "-m", "peers.convert", engine.name, kind, str(folder), str(target)])
        except subprocess.CalledProcessError as e:
            return f"its converter failed: {last_error(e.stderr)}"
    return None


def source_of(folder: Path) -> Path:
    """The GGUF that bundles are made from."""
    if MODELS[folder.name].random:
        return folder / "source.gguf"
    command = [sys.executable, str(REPOSITORY / "examples" / "fetch_model.py"), folder.name]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def export(source: Path, bundle: Path, recipe: str, kv_cache: str | None, model: Model | None = None) -> None:
    """Makes the bundle if it isn't there, or was made by other code; in a process that gives its memory back.

    ``model``: the limits of its export; None sets none.
    """
    made_by = bundle.with_suffix(".json")
    origin = {"code": fingerprint(REPOSITORY), "source": source.name, "recipe": recipe, "kv_cache": kv_cache}
    if bundle.exists() and made_by.exists() and json.loads(made_by.read_text()) == origin:
        return
    options = json.dumps({"kv_cache": kv_cache, "max_memory": model.max_memory if model else None})
    max_kl = str(model.max_kl) if model and model.max_kl else ""
    quietly([sys.executable, "-c", EXPORT, str(source), str(bundle), recipe, max_kl, options])
    made_by.write_text(json.dumps(origin))


def fingerprint(repository: Path) -> str:
    """Hashes all code that decides what an export makes."""
    digest = hashlib.sha256()
    for part in PARTS:
        for path in sorted(p for pattern in SOURCES for p in (repository / part).rglob(pattern)):
            digest.update(str(path.relative_to(repository)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def quietly(command: Sequence[str]) -> None:
    """Runs it without its output. Raises subprocess.CalledProcessError, which has what it wrote."""
    # Threads that wait for each other sleep: preparing takes minutes, in which the machine may have other work.
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS), "OMP_WAIT_POLICY": "passive"}
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=BENCHMARKS, env=environment)
