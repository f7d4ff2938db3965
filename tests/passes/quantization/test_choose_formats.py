"""The format of each weight, weights that the default isn't for, and recipes that are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.fusion.fuse_qkv import FuseQkv
from enginewright.passes.ir.prequantized import CodeFormat, Codes, SourceCodes
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from enginewright.passes.quantization.choose_formats import FORMAT, ChooseFormats
from enginewright.runtime.shared.errors import PassError, RecipeError
from tests.passes.lowering.lowered import features
from tests.passes.small_programs import Linear, Shape, decoder, program_from

aten, ew = torch.ops.aten, torch.ops.ew

F32, BF16 = WeightFormat(), WeightFormat(storage="bf16", activation="bf16")
INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
PER_CHANNEL = WeightFormat(storage="int8", activation="int8")
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT4_64 = WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64)
INT4_128 = WeightFormat(storage="int4", group_size=128, activation="int8", activation_group_size=128)
INT4_CHANNEL = WeightFormat(storage="int4", activation="int8")


def choose(program: Program, default: WeightFormat, *overrides: tuple[str, WeightFormat], **given: Any) -> PassRecord:
    named = tuple(FormatOverride(layers=path, format=one) for path, one in overrides)
    formats = WeightFormats(default=default, overrides=named, **given)
    return ChooseFormats().run(program, PassContext(recipe=PassOptions(weights=formats)))


def formats(program: Program) -> dict[str, WeightFormat]:
    """Gives them by module path of the product, or name of the table."""
    nodes = program.nodes_of(ew.linear.default, ew.embedding.default, ew.grouped_linear.default)
    return {n.meta["where"][0] or n.target._schema.name: n.meta[FORMAT] for n in nodes}


@pytest.mark.parametrize("default", [F32, BF16, INT8])
def test_the_default_is_for_all(default: WeightFormat) -> None:
    program = decoder(Shape(intermediate=64, heads=8, kv_heads=8))
    record = choose(program, default)
    assert set(formats(program).values()) == {default}
    assert record.matched == (0 if default == F32 else 2 * 7 + 2)
    assert record.rejected == ()


def test_the_first_override_that_matches_counts() -> None:
    program = decoder(Shape(heads=8, kv_heads=8, tied=False))
    choose(program, INT8, ("layers.0.down_proj", BF16), ("*.down_proj", F32))
    by_name = formats(program)
    assert by_name["layers.0.down_proj"] == BF16
    assert by_name["layers.1.down_proj"] == F32
    assert by_name["layers.0.o_proj"] == by_name["layers.1.up_proj"] == INT8


def test_a_tied_table_has_the_format_of_its_head() -> None:
    class Head(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(size, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ew.linear(x, self.weight, None)

    class Table(torch.nn.Module):
        def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ew.embedding(ids, weight)

    inner = torch.nn.Module()
    inner.head, inner.table = Head(40), Table()

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(m.head(m.table(i["ids"], m.head.weight)), i["rows"])

    for override, table in (("head", BF16), ("table", INT8)):
        program = program_from(call, inner)
        choose(program, INT8, (override, BF16))
        assert formats(program)["head"] == (BF16 if override == "head" else INT8)
        assert formats(program)["table"] == (table if override == "head" else BF16)


def _routed(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = torch.sin(features(i, 32))
    scores = torch.softmax(m.router(x), -1)
    weights, ids = torch.topk(scores, 2, -1)
    order, rows, starts = ew.route_experts(ids, 64)
    y = ew.combine_experts(ew.grouped_linear(ew.take_rows(x, rows), starts, m.experts, None), order, weights)
    return ew.take_rows(m.out(y * torch.sigmoid(m.gate(x))), i["rows"])


def routed() -> Program:
    """A router, a gate of one output, experts and a linear; random, and the same at every call."""
    torch.manual_seed(0)
    inner = torch.nn.Module()
    inner.router, inner.gate, inner.out = Linear(64, 32), Linear(1, 32), Linear(50, 32)
    inner.experts = torch.nn.Parameter(torch.randn(64, 32, 32))
    return program_from(_routed, inner)


@pytest.mark.parametrize("default", [BF16, INT8])
def test_routers_and_narrow_products_stay_float(default: WeightFormat) -> None:
    program = routed()
    record = choose(program, default)
    assert formats(program) == {"router": F32, "gate": F32, "out": default, "ew::grouped_linear": default}
    reasons = {r.where: r.reason for r in record.rejected}
    assert re.fullmatch(r"its result decides what \S+ chooses", reasons["router"])
    assert reasons["gate"] == "it has 1 outputs, fewer than a panel of 32"


def test_experts_must_have_been_lowered() -> None:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = features(i, 32)
        weights, ids = torch.topk(x[:, :4], 2, -1)
        return ew.take_rows(ew.moe(x, ids, weights, m.up, None, m.down, None, "silu", False), i["rows"])

    inner = torch.nn.Module()
    inner.up, inner.down = torch.nn.Parameter(torch.randn(4, 8, 32)), torch.nn.Parameter(torch.randn(4, 32, 8))
    with pytest.raises(PassError, match="choose_formats requires 'experts are linears already"):
        choose(program_from(call, inner), INT8)


def test_an_override_is_taken_at_its_word() -> None:
    program = routed()
    assert choose(program, INT8, ("router", BF16), ("gate", BF16)).rejected == ()
    assert formats(program)["router"] == formats(program)["gate"] == BF16


def test_a_weight_computed_from_the_inputs_stays_float() -> None:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = features(i, 32)
        return ew.take_rows(ew.linear(x, features({"ids": i["ids"][:1]}, 32).expand(40, 32), None), i["rows"])

    program = program_from(call)
    (rejection,) = choose(program, INT8).rejected
    assert rejection.reason == "its weight is computed from the inputs"
    with pytest.raises(PassError, match=r"ew\.linear.*storage bf16, but its weight is computed from the inputs"):
        choose(program, F32, ("*", BF16))


def _tables(width: int, source: str, dtype: torch.dtype, rows: int = 67) -> Program:
    """Two tables, of 67 tokens and of positions; the second one's source has that name, dtype and number of rows."""

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = ew.embedding(i["ids"], m.tokens) + ew.embedding(i["positions"], m.positions)
        return ew.take_rows(x.float(), i["rows"])

    inner = torch.nn.Module()
    inner.tokens, inner.positions = (torch.nn.Parameter(torch.randn(n, width)) for n in (67, rows))
    program = program_from(call, inner)
    (table,) = (n for n in program.graph.nodes if n.op == "get_attr" and n.target == "positions")
    expr = Source(source, (rows, width), dtype, lambda: torch.ones(rows, width).to(dtype))
    program.replace(table, program.weight("other", expr))
    return program


@pytest.mark.parametrize("width", [8, 33])
@pytest.mark.parametrize("default", [BF16, INT8])
@pytest.mark.parametrize(
    ("source", "dtype", "reason"),
    [
        ("computed:sines", torch.float32, "its table is in no checkpoint, the model computes it"),
        ("hashes", torch.int64, "its weight holds integers"),
    ],
)
def test_tables_that_stay_as_they_are(
    width: int, default: WeightFormat, source: str, dtype: torch.dtype, reason: str
) -> None:
    program = _tables(width, source, dtype)
    assert [r.reason for r in choose(program, default).rejected] == [reason]
    assert [n.meta[FORMAT] for n in program.nodes_of(ew.embedding.default)] == [default, F32]
    learned = _tables(width, "positions", torch.float32)
    assert choose(learned, default).rejected == ()
    assert [n.meta[FORMAT] for n in learned.nodes_of(ew.embedding.default)] == [default, default]


@pytest.mark.parametrize(("rows", "default", "kept"), [(4, INT8, True), (5, INT8, False), (4, BF16, False)])
def test_tables_with_few_rows_are_not_rounded_to_integers(rows: int, default: WeightFormat, kept: bool) -> None:
    program = _tables(32, "positions", torch.float32, rows)
    record = choose(program, default)
    reasons = ["it has 4 rows, where the largest table has 67"] if kept else []
    assert [r.reason for r in record.rejected] == reasons
    assert [n.meta[FORMAT] for n in program.nodes_of(ew.embedding.default)] == [default, F32 if kept else default]
    program = _tables(32, "positions", torch.float32, rows)
    choose(program, default, ("*", INT8))
    assert program.nodes_of(ew.embedding.default)[1].meta[FORMAT] == INT8


def test_integers_are_never_rounded() -> None:
    program = _tables(8, "hashes", torch.int64)
    with pytest.raises(PassError, match="an override gives it the storage int8, but its weight holds integers"):
        choose(program, F32, ("*", INT8))


def test_what_weighs_experts_stays_float() -> None:
    """A product that has no part in the choice, but in how much the chosen count."""

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.sin(features(i, 32))
        order, rows, starts = ew.route_experts(i["ids"][:, None] % 64, 64)
        y = ew.grouped_linear(ew.take_rows(x, rows), starts, m.experts, None)
        weights = torch.sigmoid(m.router(x))[:, :1]
        return ew.take_rows(m.out(ew.combine_experts(y, order, weights)), i["rows"])

    inner = torch.nn.Module()
    inner.router, inner.out = Linear(64, 32), Linear(50, 32)
    inner.experts = torch.nn.Parameter(torch.randn(64, 32, 32))
    program = program_from(call, inner)
    (rejection,) = choose(program, INT8).rejected
    assert rejection.where == "router"
    assert formats(program) == {"router": F32, "out": INT8, "ew::grouped_linear": INT8}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((("*.dwon_proj", F32),), r"weights.overrides.0: layers '\*.dwon_proj': it matches no linear"),
        (
            (("*.down_proj", F32), ("layers.1.d*", BF16)),
            r"overrides.1: layers 'layers.1.d\*': an earlier one .* layers.1",
        ),
    ],
)
def test_an_override_without_effect_is_named(overrides: tuple[tuple[str, WeightFormat], ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        choose(decoder(Shape()), INT8, *overrides)
    assert re.search(r"layers\.0\.q_proj, .* and \d+ more\.$", str(caught.value.hint))


def test_parts_of_one_product_can_not_differ() -> None:
    program = decoder(Shape())
    FuseQkv().run(program, PassContext())
    with pytest.raises(PassError, match=r"q_proj.*became one product.*v_proj: f32") as caught:
        choose(program, INT8, ("*.v_proj", F32))
    assert "turn off the fusion" in str(caught.value.hint)
    choose(program, INT8, ("*.[qkv]_proj", F32))
    assert formats(program)["layers.0.q_proj"] == F32
    choose(program, INT8, *((f"*.{one}_proj", BF16) for one in "kqv"))
    assert formats(program)["layers.0.q_proj"] == BF16


@pytest.mark.parametrize("size", [65536, 65540])
def test_sums_that_do_not_fit_are_refused(size: int) -> None:
    inner = torch.nn.Module()
    inner.wide = Linear(32, size)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(m.wide(i["ids"].float()[:, None].expand(-1, size)), i["rows"])

    program = program_from(call, inner)
    choose(program, INT8)
    if size > 65536:
        with pytest.raises(PassError, match="a sum of 65,540 products of 8-bit integers may not fit"):
            choose(program, PER_CHANNEL)
    else:
        choose(program, PER_CHANNEL)
    assert formats(program)["wide"] == (INT8 if size > 65536 else PER_CHANNEL)


@pytest.mark.parametrize(("tied", "cap"), [(True, 0.0), (False, 5.0)])
def test_embeddings_and_the_head_have_a_format_of_their_own(tied: bool, cap: float) -> None:
    program = decoder(Shape(intermediate=64, heads=8, kv_heads=8, tied=tied, logits_cap=cap))
    choose(program, INT4, embeddings=INT8)
    head = program.nodes_of(ew.linear.default)[-1]
    (table,) = program.nodes_of(ew.embedding.default)
    assert head.meta[FORMAT] == table.meta[FORMAT] == INT8
    assert {n.meta[FORMAT] for n in program.nodes_of(ew.linear.default)[:-1]} == {INT4}
    assert program.weight_of(head.args[1]) is not None
    overridden = decoder(Shape(intermediate=64, heads=8, kv_heads=8, tied=tied))
    choose(overridden, INT4, ("layers.1.down_proj", BF16), embeddings=INT8)
    assert overridden.nodes_of(ew.linear.default)[-2].meta[FORMAT] == BF16
    assert overridden.nodes_of(ew.linear.default)[-1].meta[FORMAT] == INT8


def test_a_product_before_the_head_is_none() -> None:
    """It has as many outputs as there are logits, but another product follows it."""
    inner = torch.nn.Module()
    inner.wide, inner.head = Linear(67, 32), Linear(67, 67)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(m.head(m.wide(features(i, 32))) * 2.0, i["rows"])

    program = program_from(call, inner)
    choose(program, BF16, embeddings=INT8)
    assert formats(program) == {"wide": BF16, "head": INT8}


def narrow(size: int) -> Program:
    inner = torch.nn.Module()
    inner.narrow = Linear(40, size)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(m.narrow(features(i, size)), i["rows"])

    return program_from(call, inner)


def test_blocks_of_scales_that_are_not_whole() -> None:
    """A default does without them, an override is refused."""
    blocks = INT4.model_copy(update={"scale_block": 8})
    program = narrow(576)
    result = choose(program, blocks)
    assert formats(program) == {"narrow": INT4}
    assert [r.reason for r in result.rejected] == ["a scale for each group: its 576 inputs aren't blocks of 256"]
    with pytest.raises(PassError, match="its input dimension of 576 isn't a multiple of 8 groups of 32") as e:
        choose(narrow(576), F32, ("narrow", blocks))
    assert "scale_block = 0" in str(e.value.hint)
    whole = narrow(512)
    assert choose(whole, blocks).rejected == ()
    assert formats(whole) == {"narrow": blocks}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("chosen", "size", "others"),
    [
        (INT4, 48, "groups of 16 or group_size = 0 or "),
        (INT4, 44, ""),
        (INT4_64, 96, "groups of 16 or groups of 32 or group_size = 0 or "),
        (INT4_128, 576, "groups of 16 or groups of 32 or groups of 64 or group_size = 0 or "),
    ],
)
def test_groups_that_do_not_divide_are_refused(chosen: WeightFormat, size: int, others: str) -> None:
    message = f"dimension of {size} isn't a multiple of int4's groups of {chosen.group_size}"
    with pytest.raises(PassError, match=f"narrow.*{message}") as e:
        choose(narrow(size), chosen)
    assert e.value.hint == f"Give it {others}storage int8, by an override in the recipe."
    table = decoder(Shape(hidden=size, heads=8, kv_heads=8, intermediate=64))
    with pytest.raises(PassError, match=message):
        choose(table, F32, embeddings=chosen)
    assert choose(narrow(size), INT8).matched == 1


@pytest.mark.parametrize("size", [40, 576])
@pytest.mark.parametrize("zero_point", [False, True])
def test_one_scale_a_channel_of_4_bits_is_a_group_of_all_inputs(size: int, zero_point: bool) -> None:
    chosen = INT4_CHANNEL.model_copy(update={"zero_point": zero_point})
    program = decoder(Shape(hidden=size, heads=8, kv_heads=8, intermediate=64))
    choose(program, chosen)
    by_name = formats(program)
    for name, inputs in (("layers.0.q_proj", size), ("ew::embedding", size), ("layers.0.down_proj", 64)):
        assert by_name[name] == chosen.model_copy(update={"group_size": inputs, "activation_group_size": inputs})


@pytest.mark.parametrize(
    ("size", "message"), [(36, "multiple of 8, which int4 needs"), (1 << 17, "may not fit into 32")]
)
def test_a_channel_that_4_bits_can_not_have(size: int, message: str) -> None:
    with pytest.raises(PassError, match=rf"narrow.*{message}"):
        choose(narrow(size), INT4_CHANNEL)


def stored(program: Program, *names: str, kind: CodeFormat) -> Program:
    """The weights of these names as a checkpoint has them that holds integers."""
    for node in list(program.graph.nodes):
        if node.op == "get_attr" and str(node.target) in names:
            shape = program.weights[str(node.target)].shape
            codes = SourceCodes(
                str(node.target),
                shape,
                torch.float32,
                lambda shape=shape: torch.zeros(shape),
                format=kind,
                read_codes=lambda: Codes(torch.zeros(0), torch.zeros(0)),
            )
            program.replace(node, program.weight(f"{node.target}.stored", codes))
    return program


def keeping(program: Program, default: WeightFormat, *overrides: tuple[str, WeightFormat]) -> PassRecord:
    return choose(program, default, *overrides, keep_blocks=True)


Q4_1, Q8_0 = CodeFormat(4, 32, offsets=True), CodeFormat(8, 32)


def test_blocks_are_kept_whatever_the_default() -> None:
    program = decoder(Shape(heads=8, kv_heads=8, intermediate=64))
    stored(program, "layers.0.o_proj.weight", "layers.1.o_proj.weight", "layers.1.up_proj.weight", kind=Q4_1)
    stored(program, "embed", kind=Q8_0)
    assert keeping(program, BF16, ("layers.1.o_proj", F32)).rejected == ()
    by_name = formats(program)
    as_q4_1 = WeightFormat(storage="int4", group_size=32, zero_point=True, activation="int8", activation_group_size=32)
    assert by_name["layers.0.o_proj"] == by_name["layers.1.up_proj"] == as_q4_1
    assert by_name["layers.1.o_proj"] == F32, "an override is taken at its word"
    assert by_name["layers.0.down_proj"] == BF16
    assert program.nodes_of(ew.linear.default)[-1].meta[FORMAT] == INT8
    assert program.nodes_of(ew.embedding.default)[0].meta[FORMAT] == INT8


def test_floats_with_scales_are_kept_too() -> None:
    program = decoder(Shape(heads=8, kv_heads=8, intermediate=64))
    stored(program, "layers.0.o_proj.weight", kind=CodeFormat(8, 64, kind="fp8"))
    keeping(program, INT8)
    assert formats(program)["layers.0.o_proj"] == WeightFormat(storage="fp8", group_size=64)


@pytest.mark.parametrize(
    ("kind", "common", "storage"),
    [
        (CodeFormat(3, 32), False, "int3"),
        (CodeFormat(3, 32), True, "int4"),
        (CodeFormat(2, 64, offsets=True), True, "int4"),
        (CodeFormat(2, 16), True, "bf16"),
        (CodeFormat(3, 32, scale_block=8), True, "bf16"),
        (CodeFormat(5, 32), True, "bf16"),
    ],
    ids=str,
)
def test_few_bits_are_kept_in_4_where_not_every_target_reads_them(kind: CodeFormat, common: bool, storage: str) -> None:
    program = stored(decoder(Shape(heads=8, kv_heads=8, intermediate=64)), "layers.0.o_proj.weight", kind=kind)
    expected = WeightFormats(default=BF16, keep_blocks=True)
    ChooseFormats().run(program, PassContext(recipe=PassOptions(weights=expected), common_formats=common))
    form = formats(program)["layers.0.o_proj"]
    assert form.storage == storage
    if storage != "bf16":
        assert (form.group_size, form.zero_point) == (kind.group_size, kind.offsets)


def test_blocks_of_routers_and_narrow_products_become_floats() -> None:
    program = stored(routed(), "router.weight", "gate.weight", "out.weight", kind=Q4_1)
    assert {r.where for r in keeping(program, F32).rejected} == {"router", "gate"}
    assert formats(program)["router"] == F32
    assert formats(program)["out"].storage == "int4"


@pytest.mark.parametrize("others", [Q8_0, None])
def test_a_product_of_different_blocks_takes_the_default(others: CodeFormat | None) -> None:
    program = decoder(Shape(heads=8, kv_heads=8))
    stored(program, *(f"layers.0.{one}_proj.weight" for one in "qk"), kind=Q4_1)
    if others is not None:
        stored(program, "layers.0.v_proj.weight", kind=others)
    FuseQkv().run(program, PassContext())
    (rejection,) = keeping(program, BF16).rejected
    other = "floats and int4-g32-zp-a:int8:g32" if others is None else "int4-g32-zp-a:int8:g32 and int8-g32-a:int8:g32"
    assert rejection.reason == f"its blocks are not kept: its parts are stored as {other}"
    assert formats(program)["layers.0.q_proj"] == BF16


def test_keeping_blocks_that_are_not_there_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"weights\.keep_blocks is true, but no weight .* is stored in blocks"):
        keeping(decoder(Shape()), INT8)


def test_blocks_are_not_kept_unless_asked_for() -> None:
    program = stored(decoder(Shape(heads=8, kv_heads=8)), "layers.0.o_proj.weight", kind=Q4_1)
    choose(program, BF16)
    assert formats(program)["layers.0.o_proj"] == BF16
