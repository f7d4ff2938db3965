"""The ops of lowered programs, each declared once: operands, attributes, results, and how it is counted.

``problem_of_step`` checks a step's operands and attributes by it, and so does the cpu target's step_verifier.cpp, for
which ``plugins/native/ops/write_declarations.py`` makes a header of it. ``step_costs.py`` counts by it,
``passes/lowering/lower_ew.py`` lowers ops that are called as they are declared, and the tables of
docs/inside/lowered-ops.md are made of it. A build reads this file: it imports the standard library alone.

Shape letters: T tokens; B requests; R sampled rows; M rows of a matrix; K, N, C columns; G groups; H hidden; I
intermediate; V vocabulary; F frequencies; E experts, k of a token; Nq, Nkv heads of queries and keys; D, Dv their
sizes. "rows" are any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Cost = Literal["product", "experts", "table", "selection", "all", "meeting"]
"""The way in which the cost of a step of an op is counted:

product: M N K multiply-adds of a weight that is read once
experts: the same, of those experts that the rows go to
table: a row of the weight for each token is read
selection: of the first operand as much is read as is written
all: operands are read and written once
meeting: nothing is moved, as ranks of one machine see the same memory
"""
Kind = Literal["number", "flag", "integer", "string"]
OPTIONAL = "?"


class Input(NamedTuple):
    """An operand: its name, its shape (and type, if it isn't f32), and when it is present.

    ``when`` is "" for always, an attribute's name if that must be true, or OPTIONAL if it depends on other operands.
    """

    name: str
    shape: str
    when: str = ""

    @property
    def row(self) -> str:
        return f"{self.name} {self.shape}".strip() + (OPTIONAL if self.when else "")


class Attribute(NamedTuple):
    """An attribute of an op.

    Attributes:
        name: its name.
        kind: the type of its values.
        needed: True if every step has it.
        about: its description in docs.
        values: the values that it may have; () for any.
        section: the section of docs/inside/lowered-ops.md that describes it; "" for none.
    """

    name: str
    kind: Kind
    needed: bool = True
    about: str = ""
    values: tuple[str, ...] = ()
    section: str = ""

    @property
    def row(self) -> str:
        name = f"[`{self.name}`](#{self.section})" if self.section else f"`{self.name}`"
        values = f", one of {', '.join(self.values)}" if self.values else ""
        return f"{name}{values}{self.about}"


@dataclass(frozen=True)
class OpSchema:
    """The declaration of one op.

    Attributes:
        table: the table of docs/inside/lowered-ops.md that contains it.
        cost: the way in which its cost is counted: see ``Cost``.
        inputs: its operands in order.
        outputs: its results, as docs show them.
        attributes: its attributes.
        about: a description of its operands in docs.
        means: a description of its results in docs.
        any_number: True if a step may have any number of operands, at least one, and has as many results.
        state: the dimensions of a request's state in a cache. Each is (operand, axis, number): the size of that axis of
            the operand, plus the number.
        state_products: the multiply-adds of a token for each value of the state.
    """

    table: Literal["plain", "narrow", "experts", "recurrent", "fused", "ranks"]
    cost: Cost
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()
    about: str = ""
    means: str = ""
    any_number: bool = False
    state: tuple[tuple[str, int, int], ...] = ()
    state_products: int = 0

    def values(self, attribute: str) -> tuple[str, ...]:
        """Returns the values that the attribute ``attribute`` may have; () for any."""
        return next(one.values for one in self.attributes if one.name == attribute)

    def row(self, name: str) -> str:
        """Returns the row of the reference table for this op, which has the name ``name``, in Markdown."""
        inputs = ", ".join(i.row for i in self.inputs) + self.about
        between = "; " if any(a.about or a.values for a in self.attributes) else ", "
        cells = f"`{name}`", inputs, between.join(a.row for a in self.attributes), "; ".join(self.outputs) + self.means
        return f"| {' | '.join(cells)} |".replace("|  |", "| |")


class StepLike(Protocol):
    """The fields of a lowered program's step that are checked here."""

    @property
    def op(self) -> str: ...
    @property
    def inputs(self) -> Sequence[object]: ...
    @property
    def outputs(self) -> Sequence[object]: ...
    @property
    def attrs(self) -> Mapping[str, int | float | bool | str]: ...


_TYPES: Mapping[Kind, tuple[type, ...]] = {"number": (int, float), "flag": (bool,), "integer": (int,), "string": (str,)}
_NAMES: Mapping[Kind, str] = {"number": "a number", "flag": "a boolean", "integer": "an integer", "string": "a string"}


def problem_of_step(step: StepLike) -> str | None:
    """Returns a message about the first contradiction between a step and its op's declaration; None if there is none.

    A step of an op that isn't in ``OPS``, such as another target's, has none.
    """
    if (op := OPS.get(step.op)) is None:
        return None
    known = {a.name: a for a in op.attributes}
    for name, value in step.attrs.items():
        if name not in known:
            return f"it has no attribute {name}"
        kind, values = known[name].kind, known[name].values
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "flag"):
            return f"attribute {name} is not {_NAMES[kind]}"
        if values and value not in values:
            return f"attribute {name} is {value!r:.40}, and none of {', '.join(values)}"
    for attribute in op.attributes:
        if attribute.needed and attribute.name not in step.attrs:
            return f"attribute {attribute.name} is missing"
    counts = len(step.inputs), len(step.outputs)
    if op.any_number:
        return None if counts[0] == counts[1] > 0 else f"it has {counts[0]} inputs and {counts[1]} outputs"
    fewest = sum(i.when == "" or step.attrs.get(i.when, False) is True for i in op.inputs)
    most = fewest + sum(i.when == OPTIONAL for i in op.inputs)
    if not fewest <= counts[0] <= most or counts[1] != len(op.outputs):
        takes = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        return f"it has {counts[0]} inputs and {counts[1]} outputs, and takes {takes} and {len(op.outputs)}"
    return None


_X = Input("x", "[rows,C]")
_ROWS = Input("x", "[M,K]")
_EPS, _HAS_WEIGHT, _HAS_BIAS = (
    Attribute("eps", "number"),
    Attribute("has_weight", "flag"),
    Attribute("has_bias", "flag"),
)
_GROUP_SIZE = Attribute("group_size", "integer")
_QUANTIZED = ("values i8 [M,K]", "scales [M,G]", "sums i32 [M,G]")


def _norms(
    table: Literal["plain", "fused"], x: Input, outputs: tuple[str, ...], last: tuple[Attribute, ...]
) -> dict[str, OpSchema]:
    """Returns the declarations of the four norms: rms_norm and layer_norm, each alone and of a sum."""
    size, residual = f"[{x.shape[-2]}]", Input("residual", x.shape)
    weight, bias = Input("weight", size, "has_weight"), Input("bias", size, "has_bias")
    forms = {}
    for add in (False, True):
        for layer in (False, True):
            inputs = (x, *((residual,) if add else ()), weight, *((bias,) if layer else ()))
            attributes = (_EPS, _HAS_WEIGHT, *((_HAS_BIAS,) if layer else ()), *last)
            name = f"{'add_' if add else ''}{'layer' if layer else 'rms'}_norm{'_quantize' if last else ''}"
            forms[name] = OpSchema(table, "all", inputs, (*outputs, *((f"sum {x.shape}",) if add else ())), attributes)
    return forms


_EPILOGUE = (
    Attribute("has_bias", "flag", False, " (from the operands)"),
    Attribute("activation", "string", False, ' ("")', section="fused-steps"),
)
_OF_LINEARS = (*_EPILOGUE, Attribute("has_residual", "flag", False, " (false)", section="fused-steps"))
_BIAS_OF_LINEAR, _RESIDUAL_OF_LINEAR = Input("bias", "[N]", OPTIONAL), Input("residual", "[M,N]", "has_residual")
_OFFSETS = Attribute("has_offsets", "flag", False, " (false)")
_INTEGERS = (
    Input("values", "i8 [M,K]"),
    Input("scales", "[M,G]"),
    Input("sums", "i32 [M,G]"),
)
_INTEGER_GROUPS = (Attribute("weight_group", "integer"), Attribute("activation_group", "integer"), _OFFSETS)
_PAST = (
    Input("cache", ""),
    Input("block_table", "i32 [B,M]"),
    Input("q_start", "i32 [B+1]"),
    Input("kv_len", "i32 [B]"),
)
_OF_HEADS = (Input("sinks", "[Nq]", "has_sinks"), Input("slopes", "[Nq]", "has_slopes"))
_ATTENTION = (Input("q", "[T,Nq,D]"), *_PAST, *_OF_HEADS)
_OF_ATTENTION = (
    Attribute("scale", "number"),
    Attribute("window", "integer"),
    Attribute("softcap", "number"),
    Attribute("has_sinks", "flag", False, " (false)"),
    Attribute("has_slopes", "flag", False, " (false)"),
)
_OWNERS = tuple(Attribute(name, "integer", False, section="ranks") for name in ("ranks", "rank"))
_HAS_ENDS = Attribute("has_ends", "flag", False, " (false)")
_CHOICE = tuple(
    Attribute(name, "integer", False, section="chosen-blocks")
    for name in ("first_blocks", "last_blocks", "best_blocks", "all_below")
)
_STATES = (*_PAST, Input("slots", "i32 [T]"))
_FIRST_VALUE = Attribute("first", "integer")
_CUTS = Attribute(
    "cuts",
    "string",
    True,
    ", each rank's first column, then the number of columns. In `0,288,576;0,9,18`, a semicolon separates two matrices",
)
_RANKS = Attribute("ranks", "integer")

OPS: Mapping[str, OpSchema] = {
    "embedding": OpSchema(
        "plain",
        "table",
        (
            Input("ids", "i32 [T]"),
            Input("weight", "[V,H]"),
            Input("scales", "f16 [V,G]", OPTIONAL),
            Input("offsets", "", "has_offsets"),
        ),
        ("[T,H]",),
        (Attribute("group_size", "integer", False, section="bf16-int8-and-int4"), _OFFSETS),
    ),
    "linear": OpSchema(
        "plain",
        "product",
        (
            Input("x", "[M,K]"),
            Input("weight", "[N,K]"),
            Input("scales", "f16 [N,G]", OPTIONAL),
            Input("offsets", "", "has_offsets"),
            _BIAS_OF_LINEAR,
            _RESIDUAL_OF_LINEAR,
        ),
        ("[M,N]",),
        (Attribute("weight_group", "integer", False, section="bf16-int8-and-int4"), _OFFSETS, *_OF_LINEARS),
    ),
    **_norms("plain", _X, ("[rows,C]",), ()),
    "rope_table": OpSchema(
        "plain",
        "all",
        (Input("positions", "i32 [T]"), Input("inv_freq", "[F]")),
        ("[T,2F]",),
        (Attribute("scale", "number"),),
        means=": F cosines, then F sines",
    ),
    "rope": OpSchema(
        "plain",
        "all",
        (Input("x", "[T,N,D]"), Input("table", "[T,2F]")),
        ("[T,N,D]",),
        (Attribute("interleaved", "flag"),),
        means=". Channels i and i+F are rotated together; if `interleaved`, channels 2i and 2i+1",
    ),
    "gated_activation": OpSchema(
        "plain",
        "all",
        (Input("gate", "[rows,2I] or [rows,I]"), Input("up", "[rows,I]", OPTIONAL)),
        ("[rows,I]",),
        (Attribute("kind", "string", values=("silu", "gelu", "gelu_tanh", "relu", "sigmoid")),),
        ". Without up, gate contains both",
    ),
    "kv_write": OpSchema(
        "plain",
        "all",
        (Input("k", "[T,Nkv,D]"), Input("v", "[T,Nkv,Dv]"), Input("slots", "i32 [T]"), Input("cache", "")),
        (),
        _OWNERS,
        means="none",
    ),
    "paged_attention": OpSchema(
        "plain",
        "all",
        (*_ATTENTION, Input("ends", "", "has_ends"), Input("ends_table", "i32 [B,M]", "has_ends")),
        ("[T,Nq,Dv]",),
        (
            *_OF_ATTENTION,
            _HAS_ENDS,
            Attribute("group", "integer", False, section="heads-of-a-part"),
            Attribute("first_head", "integer", False, section="heads-of-a-part"),
            *_CHOICE,
            *_OWNERS,
        ),
        means=". A head's slope times (key position - query position) is added to its scores. `ends` is the "
        "second cache of [k4v4](numerics.md#the-kv-cache)",
    ),
    "attention": OpSchema(
        "plain",
        "all",
        (
            Input("q", "[T,Nq,D]"),
            Input("k", "[T,Nkv,D]"),
            Input("v", "[T,Nkv,Dv]"),
            Input("q_start", "i32 [B+1]"),
            *_OF_HEADS,
            Input("biases", "[Nq,2W-1]", "has_biases"),
        ),
        ("[T,Nq,Dv]",),
        (
            *_OF_ATTENTION,
            Attribute("has_biases", "flag", False, " (false)"),
            Attribute("causal", "flag", True, ", false if queries also see later keys"),
            Attribute("dtype", "string", False, " (f32), the type of the rounded keys and values: f32 or bf16"),
        ),
        means=". A query sees only keys of its request in this step. For d = key position - query position, a head's "
        "slope times abs(d) is subtracted from its scores. Its bias in column W-1+d is added",
    ),
    "pool": OpSchema(
        "plain",
        "all",
        (Input("hidden", "[T,H]"), Input("q_start", "i32 [B+1]")),
        ("[B,H]",),
        (Attribute("kind", "string", values=("mean", "cls", "last", "max", "weighted")),),
        means=", a row for each request. cls is the first token's row; weighted is a mean in which token i has the "
        "weight i + 1. A request without tokens gets zeros",
    ),
    "take_rows": OpSchema(
        "plain",
        "selection",
        (Input("x", "[T,..]"), Input("rows", "i32 [R]")),
        ("[R,..]",),
        about=". If `rows` is an input of the program, x has T rows; otherwise any number",
    ),
    "elementwise": OpSchema(
        "plain",
        "all",
        (Input("x", ""), Input("y", "", OPTIONAL), Input("z", "", OPTIONAL)),
        ("one result with any strides",),
        (
            Attribute("fn", "string"),
            Attribute("scalar", "number", False, ", a number that replaces y"),
            Attribute("scalar_first", "flag", False, " (false), true if the number is the first argument"),
        ),
        ": rank at most 4, any strides; a stride of 0 repeats values",
    ),
    "copy": OpSchema(
        "plain",
        "all",
        (Input("x", "f32 or i32"),),
        ("one result with any strides",),
        about=", rank at most 4, any strides",
        means=". To concatenate tensors, each is copied into a slice of one buffer",
    ),
    "reduce": OpSchema(
        "plain",
        "all",
        (Input("x", "[..,C]"),),
        ("[..,1]",),
        (Attribute("kind", "string", values=("sum", "mean", "max")),),
        ", rank at most 4",
    ),
    "cast_bf16": OpSchema("narrow", "all", (Input("x", "[M,K]"),), ("bf16 [M,K]",)),
    "quantize_activation": OpSchema("narrow", "all", (Input("x", "[M,K]"),), _QUANTIZED, (_GROUP_SIZE,)),
    "quantized_linear": OpSchema(
        "narrow",
        "product",
        (
            *_INTEGERS,
            Input("weight", "[N,K]"),
            Input("weight_scales", "[N,G]"),
            Input("weight_offsets", "[N,G]", "has_offsets"),
            _BIAS_OF_LINEAR,
            _RESIDUAL_OF_LINEAR,
        ),
        ("[M,N]",),
        (*_INTEGER_GROUPS, *_OF_LINEARS),
    ),
    "quantized_embedding": OpSchema(
        "narrow",
        "table",
        (
            Input("ids", "i32 [T]"),
            Input("weight", "[V,H]"),
            Input("scales", "[V,G]"),
            Input("offsets", "[V,G]", "has_offsets"),
        ),
        ("[T,H]",),
        (_GROUP_SIZE, _OFFSETS),
    ),
    "top_k": OpSchema(
        "experts",
        "all",
        (_X,),
        ("values [rows,k], greatest first", "indices i32 [rows,k]"),
        (Attribute("k", "integer"),),
        means=". Among equal values the lower index is first; NaN counts as the greatest value",
    ),
    "gather": OpSchema(
        "experts",
        "selection",
        (Input("x", "[rows,C] f32 or i32"), Input("indices", "i32 [rows,k]")),
        ("[rows,k]",),
        means=": for each row, the values of x at the indices",
    ),
    "scatter": OpSchema(
        "experts",
        "all",
        (_X, Input("indices", "i32 [rows,k]")),
        ("[rows,C]",),
        (Attribute("value", "number"),),
        means=": x with `value` at each row's indices",
    ),
    "route_experts": OpSchema(
        "experts",
        "all",
        (Input("expert_ids", "i32 [T,k]"),),
        (
            "order i32 [T\\*k]: choices, sorted by expert, then by choice number",
            "rows i32 [T\\*k]: the tokens of these choices",
            "starts i32 [E+1]: each expert's first index in `order`, then T\\*k",
        ),
        (Attribute("experts", "integer"),),
    ),
    "grouped_linear": OpSchema(
        "experts",
        "experts",
        (
            Input("x", "[M,K]"),
            Input("starts", "i32 [E+1]"),
            Input("weight", "[E,N,K]"),
            Input("scales", "[E,N,G]", OPTIONAL),
            Input("offsets", "", "has_offsets"),
            Input("bias", "[E,N]", OPTIONAL),
        ),
        ("[M,N]",),
        (Attribute("weight_group", "integer", False, section="bf16-int8-and-int4"), _OFFSETS, *_EPILOGUE),
        means=": expert e computes row m if starts[e] <= m < starts[e+1]; rows without an expert aren't written",
    ),
    "quantized_grouped_linear": OpSchema(
        "experts",
        "experts",
        (
            *_INTEGERS,
            Input("starts", "i32 [E+1]"),
            Input("weight", "[E,N,K]"),
            Input("weight_scales", "[E,N,G]"),
            Input("weight_offsets", "[E,N,G]", "has_offsets"),
            Input("bias", "[E,N]", OPTIONAL),
        ),
        ("[M,N]",),
        (*_INTEGER_GROUPS, *_EPILOGUE),
        means=". It writes the same rows as `grouped_linear`",
    ),
    "combine_experts": OpSchema(
        "experts",
        "all",
        (Input("y", "[T\\*k,H]"), Input("order", "i32 [T\\*k]"), Input("expert_weights", "[T,k]")),
        ("[T,H]",),
        means=": for each token t, the sum over j of expert_weights[t,j] times the row of y for choice t\\*k + j",
    ),
    "stored_convolution": OpSchema(
        "recurrent",
        "all",
        (Input("x", "[T,C]"), Input("weight", "[C,W]"), Input("bias", "[C]", "has_bias"), *_STATES),
        ("[T,C]",),
        (
            _FIRST_VALUE,
            Attribute("activation", "string", True, ', "" for none'),
            Attribute("has_bias", "flag", False, " (false)"),
        ),
        means=": for each channel, the weighted sum of its last W inputs. The state is the last W-1 inputs, [W-1,C]",
        state=(("weight", 0, 0), ("weight", 1, -1)),
        state_products=1,
    ),
    "stored_scan": OpSchema(
        "recurrent",
        "all",
        (
            Input("x", "[T,N,P]"),
            Input("dt", "[T,N]"),
            Input("a", "[N] or [N,S]"),
            Input("b", "[T,G,S]"),
            Input("c", "[T,G,S]"),
            *_STATES,
        ),
        ("[T,N,P]",),
        (_FIRST_VALUE,),
        means=", computed as by [`selective_scan`](ops.md). The state is [N,S,P]",
        state=(("x", 1, 0), ("b", 2, 0), ("x", 2, 0)),
        state_products=3,
    ),
    "stored_delta_rule": OpSchema(
        "recurrent",
        "all",
        (
            Input("q", "[T,Nk,D]"),
            Input("k", "[T,Nk,D]"),
            Input("v", "[T,N,Dv]"),
            Input("decay", "[T,N] or [T,N,D]"),
            Input("beta", "[T,N]"),
            *_STATES,
        ),
        ("[T,N,Dv]",),
        (_FIRST_VALUE, Attribute("scale", "number"), Attribute("normalize", "flag")),
        means=", computed as by [`gated_delta_rule`](ops.md). The state is [N,D,Dv]",
        state=(("v", 1, 0), ("k", 2, 0), ("v", 2, 0)),
        state_products=4,
    ),
    **_norms("fused", _ROWS, _QUANTIZED, (_GROUP_SIZE,)),
    "rope_kv_write": OpSchema(
        "fused",
        "all",
        (
            Input("q", "[T,Nq,D]"),
            Input("k", "[T,Nkv,D]"),
            Input("v", "[T,Nkv,Dv]"),
            Input("table", "[T,2F]"),
            Input("slots", "i32 [T]"),
            Input("cache", ""),
            Input("ends", "", "has_ends"),
            Input("ends_slots", "i32 [T]", "has_ends"),
        ),
        ("rotated q [T,Nq,D]",),
        (Attribute("interleaved", "flag"), _HAS_ENDS, *_OWNERS),
        ". D is at most 1024",
        ". The rotated k and the unchanged v are written to the caches",
    ),
    "all_gather": OpSchema(
        "ranks",
        "meeting",
        (),
        ("the whole matrices, in the same buffers",),
        (
            _RANKS,
            Attribute("to", "integer", True, ", the only rank that needs the whole matrices, or -1 for all ranks"),
            _CUTS,
        ),
        "matrices [M,C]: the columns that this rank has written",
        any_number=True,
    ),
    "gather_experts": OpSchema(
        "ranks",
        "meeting",
        (Input("y", "[M,N]"), Input("starts", "i32 [E+1]")),
        ("the whole y, in the same buffer",),
        (_RANKS, Attribute("cuts", "string", True, ", the first expert of each rank, then the number of experts")),
        ". This rank has written the rows of its experts",
    ),
    "send": OpSchema(
        "ranks",
        "meeting",
        (),
        ("the same columns, in buffers between the two stages",),
        (
            Attribute("first", "integer", True, ", the first rank of the next stage"),
            Attribute("ranks", "integer", True, ", the number of ranks of the next stage"),
        ),
        "matrices [M,C]: the columns that this rank sends to the next stage",
        any_number=True,
    ),
    "receive": OpSchema(
        "ranks",
        "meeting",
        (),
        ("the same matrices, in this rank's buffers",),
        (
            Attribute("first", "integer", True, ", the first rank of the previous stage"),
            Attribute("ranks", "integer", True, ", the number of ranks of the previous stage"),
            Attribute("cuts", "string", True, ", the columns that each of these ranks sends, as in `all_gather`"),
        ),
        "matrices [M,C], in buffers between the two stages",
        any_number=True,
    ),
    "ring_attention": OpSchema(
        "ranks",
        "all",
        _ATTENTION,
        ("[T,n,Dv]",),
        (*_OF_ATTENTION, _RANKS, Attribute("rank", "integer"), Attribute("first_head", "integer")),
        ". q has all heads",
        ": the n heads of this rank, from head `first_head` on",
    ),
}
"""The ops of the cpu target by name. Other targets that run lowered programs have a part of them."""
