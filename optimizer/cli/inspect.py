"""``optimize inspect``: shows the contents of a bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.json_document import parse_shown
from enginewright.runtime.shared.targets import part

from .console import comparison_lines, print_json, reported
from .options import AsJson, BundlePath, known_target

if TYPE_CHECKING:
    from enginewright.runtime.bundle.reader import Bundle
    from enginewright.runtime.shared.contracts import PoolingInfo
    from enginewright.runtime.shared.lowered_program import LoweredProgram, Operand

REPORT_PATH = "report/report.json"
POOL = "pool"
"""The op of a lowered program that reduces a text's tokens to one row."""
EPILOG = (
    "Examples:\n\n"
    "  optimize inspect smollm2.bundle\n\n"
    "  optimize inspect smollm2.bundle --program | less\n\n"
    "  optimize inspect smollm2.bundle --program --partition tensor=2 --rank 1 | grep gather\n\n"
    "  optimize inspect smollm2.bundle --weights --json"
)


@reported
def command(
    bundle: BundlePath,
    program: Annotated[
        bool, typer.Option("--program", help="Print the steps that a target runs, one per line.")
    ] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Print each tensor's shape, layout and size.")] = False,
    passes: Annotated[
        bool, typer.Option("--passes", help="Print each pass's numbers of matches and rejections.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", callback=known_target, help="The target for --program; default: cpu."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="tensor=N", help="With --program, print the program of one rank."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="The rank for --partition; default: the first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the contents of a bundle; without an option, a summary."""
    from enginewright.runtime.bundle.reader import Bundle
    from enginewright.runtime.shared.targets import MEASURED

    if program + weights + passes > 1:
        raise typer.BadParameter("choose one of --program, --weights and --passes")
    if target is not None and not program:
        raise typer.BadParameter("--target says whose program --program shows")
    if partition is not None and not program:
        raise typer.BadParameter("--partition says how --program is cut")
    if rank is not None and partition is None:
        raise typer.BadParameter("--rank says whose part --partition shows")
    opened = Bundle.open(bundle)
    if program:
        lowered = opened.program(target or MEASURED)
        if partition is not None:
            lowered = _of_rank(lowered, partition, rank or 0)
        if as_json:
            print_json(lowered.model_dump(mode="json", exclude_defaults=True))
        else:
            _print_program(lowered)
    elif weights:
        if as_json:
            print_json({name: entry.model_dump(mode="json") for name, entry in opened.index.tensors.items()})
        else:
            _print_weights(opened)
    elif passes:
        if as_json:
            print_json([summary.model_dump(mode="json") for summary in opened.manifest.passes])
        else:
            _print_passes(opened)
    elif as_json:
        print_json(_summary(opened))
    else:
        _print_summary(opened)


def _of_rank(program: LoweredProgram, text: str, rank: int) -> LoweredProgram:
    from enginewright.runtime.ranks.partition import Partition
    from enginewright.runtime.ranks.rank_programs import partition

    how = Partition.parse(text)
    if rank >= how.ranks:
        raise typer.BadParameter(f"--rank {rank} is none of the {how.ranks} ranks")
    return partition(program, how)[rank]


def _summary(bundle: Bundle) -> dict[str, Any]:
    from enginewright.runtime.executors.open import carried_code

    manifest = bundle.manifest
    sections = manifest.model_dump(mode="json", include={"format_version", "model", "source", "toolchain"})
    sections["hash"] = bundle.hash
    sections["targets"] = {n: t.model_dump(mode="json", exclude={"files"}) for n, t in bundle.targets.items()}
    for name in sections["targets"]:
        sections["targets"][name]["carries"] = carried_code(name)
    recipe = manifest.recipe.get("name")
    sizes = {"bundle_bytes": sum(f.bytes for f in bundle.files.values())}
    sizes["weight_bytes"] = sum(t.bytes for t in bundle.index.stored_once().values())
    types = Counter[str]()
    for tensor in bundle.index.stored_once().values():
        types[tensor.kind] += tensor.bytes
    groups = {name: [g.model_dump(mode="json") for g in p.cache_groups] for name, p in bundle.programs.items()}
    return sections | {
        "recipe": recipe,
        "sizes": sizes,
        "weight_bytes_by_type": dict(types.most_common()),
        "cache_groups": groups,
        "buckets": {name: [b.model_dump(mode="json") for b in plan.buckets] for name, plan in bundle.buckets.items()},
        "passes": len(manifest.passes),
        "verification": _verification(bundle),
    }


def _verification(bundle: Bundle) -> list[dict[str, Any]] | None:
    """Returns the export's comparison with the source, an entry for each target; None if the bundle has none.

    Raises BundleError if the report can't be read.
    """
    path = bundle.path / REPORT_PATH
    try:
        report = parse_shown(read_regular(path, most=MOST_JSON_BYTES))
        if "verification" not in report:
            return None
        entries: list[dict[str, Any]] = report["verification"]
        for entry in entries:
            comparison_lines(entry)  # raises if it is none
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise BundleError(
            f"{path}: no report of an export: {e or type(e).__name__}",
            hint="Nothing but `optimize inspect` reads it: export again, or remove it.",
        ) from e
    return entries


def _print_summary(bundle: Bundle) -> None:
    from enginewright.runtime.bundle.buckets import KINDS

    summary = _summary(bundle)
    _print_model(bundle, summary)
    for name in bundle.targets:
        _print_target(bundle, name)
    for name, program in bundle.programs.items():
        _print_counts(name, program)
    for name, plan in bundle.buckets.items():
        _rows("buckets", (f"{name}, {kind}: {', '.join(map(str, plan.sizes(kind))) or 'none'}" for kind in KINDS))
    for verification in summary["verification"] or []:
        _rows("verified", map(str.strip, comparison_lines(verification).splitlines()))
    _row("hash", bundle.hash)
    _rows("built with", (f"{tool} {version}" for tool, version in bundle.manifest.toolchain.items()))


def _print_model(bundle: Bundle, summary: Mapping[str, Any]) -> None:
    from enginewright.optimizer.capture.find_source import older_reader
    from enginewright.runtime.shared.memory import format_bytes

    model = bundle.manifest.model
    _row("model", f"{model.name} ({model.architecture}, {model.parameters / 1e6:,.1f} M parameters)")
    _row("source", f"{bundle.manifest.source.kind}: {bundle.manifest.source.name}")
    for adapter in bundle.manifest.source.adapters:
        _row("adapter", f"{adapter.name}, weight {adapter.weight:g}, sha256 {adapter.sha256}")
    if (older := older_reader(bundle.manifest.source)) is not None:
        _row("", older)
    if model.pooling is not None:
        _print_pooling(model.pooling, bundle.programs.values())
    _row("vocabulary", f"{model.vocab_size:,} tokens")
    _row("context", f"{model.context_length:,} tokens")
    _row("recipe", str(summary["recipe"]))
    _row(
        "size",
        f"{format_bytes(summary['sizes']['bundle_bytes'])}, of which weights "
        f"{format_bytes(summary['sizes']['weight_bytes'])} in {len(bundle.index.tensors)} tensors",
    )
    by_type = summary["weight_bytes_by_type"].items()
    _row("weights", ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in by_type))
    _row("passes", f"{summary['passes']} (see --passes)")


def _print_pooling(pooling: PoolingInfo, programs: Iterable[LoweredProgram]) -> None:
    """Prints the facts about a model of vectors, scores or classes."""
    kinds = {str(step.attrs["kind"]) for program in programs for step in program.steps if step.op == POOL}
    facts = [
        f"{pooling.dimensions} numbers",
        *([f"or {', '.join(map(str, pooling.dimension_choices))}"] if pooling.dimension_choices else []),
        *(f"pooling {kind}" for kind in sorted(kinds)),
        *(["normalized"] if pooling.normalize else []),
        *([pooling.activation] if pooling.activation != "none" else []),
        *([pooling.similarity] if pooling.task == "embed" else []),
    ]
    _row("kind", f"{pooling.task}: {', '.join(facts)}")
    default = {pooling.default_prompt: " (default)"}
    _rows("prompts", (f"{name}{default.get(name, '')}: {text!r}" for name, text in pooling.prompts.items()))
    if pooling.labels:
        _row("labels", ", ".join(pooling.labels))
    _rows("template", (repr(text) for text in (pooling.query_template, pooling.document_template) if text))


def _print_target(bundle: Bundle, name: str) -> None:
    from enginewright.runtime.executors.open import carried_code

    target = bundle.targets[name]
    _row("target", f"{name}: {target.state}" + (f", needs {target.needs}" if target.needs else ""))
    if (code := carried_code(name)) is not None:
        _row("", f"carries {code}: they run only with --trust")
    described = getattr(part(name, "section"), "described", None)
    for line in () if described is None else described(bundle, name):
        _row("", line)


def _print_counts(name: str, program: LoweredProgram) -> None:
    """Prints a program's steps by their ops, and its memory."""
    from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
    from enginewright.runtime.shared.contracts import STATE
    from enginewright.runtime.shared.memory import format_bytes

    counts = ", ".join(f"{n} {op}" for op, n in Counter(s.op for s in program.steps).most_common())
    _row(name, f"{len(program.steps)} steps: {counts}")
    _row("", f"arena of {program.arena_bytes} bytes for T tokens, B requests, R sampled rows")
    if not program.cache_groups:
        _row("", "no KV cache")
    for group in program.cache_groups:
        if group.kind == STATE:
            state = format_bytes(cache_block_bytes(group))
            _row("", f"states {group.name!r}: {len(group.layers)} layers, {state} a request and a snapshot")
            continue
        first = f" and the first {group.first}" if group.first else ""
        window, keys = f", window {group.window}{first}" if group.window else "", group.planes[0]
        _row(
            "",
            f"KV cache {group.name!r}: {len(group.layers)} layers, {keys.heads} heads of "
            f"{keys.size}{' with their values' if group.values_in_keys else ''}, {group.dtype}{window}, "
            f"{format_bytes(cache_block_bytes(group) // group.block_size)} a token",
        )
    if chosen := [step.attrs for step in program.steps if "best_blocks" in step.attrs]:
        blocks = sum(int(chosen[0][name]) for name in ("first_blocks", "last_blocks", "best_blocks"))
        size = program.cache_groups[0].block_size
        below = f", from position {chosen[0]['all_below']:,} on" if chosen[0]["all_below"] else ""
        attended = f"{blocks * size:,} keys and a token's own block"
        _row("", f"adaptive context: {len(chosen)} layers look at {attended}{below}")


def _row(label: str, text: str) -> None:
    typer.echo(f"{label:<12}{text}")


def _rows(label: str, texts: Iterable[str]) -> None:
    """Prints lines, the label before the first one alone."""
    for i, text in enumerate(texts):
        _row("" if i else label, text)


def _print_passes(bundle: Bundle) -> None:
    width = max((len(summary.name) for summary in bundle.manifest.passes), default=4)
    typer.echo(f"{'pass':<{width}}  matched  rejected")
    for summary in bundle.manifest.passes:
        typer.echo(f"{summary.name:<{width}}  {summary.matched:>7}  {summary.rejected:>11}")


def _print_weights(bundle: Bundle) -> None:
    from enginewright.runtime.shared.memory import format_bytes

    width = max((len(name) for name in bundle.index.tensors), default=4)
    for name, entry in bundle.index.tensors.items():
        shape = "x".join(str(n) for n in entry.shape)
        typer.echo(f"{name:<{width}}  {entry.kind:<4}  {shape:<14} {entry.layout:<8} {format_bytes(entry.bytes):>11}")


def _print_program(program: LoweredProgram) -> None:
    for number, step in enumerate(program.steps):
        outputs = ", ".join(_operand(o) for o in step.outputs)
        inputs = ", ".join(_operand(o) for o in step.inputs)
        attrs = "".join(f" {key}={value}" for key, value in step.attrs.items())
        arrow = f"{outputs} = " if outputs else ""
        typer.echo(f"{number:>4}  {arrow}{step.op}({inputs}){attrs}" + (f"  # {step.where}" if step.where else ""))
    for name, operand in program.outputs.items():
        typer.echo(f"      {name} -> {_operand(operand)}")


def _operand(operand: Operand) -> str:
    if operand.kind == "cache":
        return f"cache {operand.name}"
    shape = ", ".join(str(n) for n in operand.shape)
    offset = f"+{operand.offset}" if operand.offset != 0 else ""
    return f"{operand.name}{offset}[{shape}]"
