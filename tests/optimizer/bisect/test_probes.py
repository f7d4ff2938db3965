from __future__ import annotations

from enginewright.optimizer.bisect.first_divergence import area
from enginewright.optimizer.bisect.probes import find_probes
from enginewright.passes.ir.calls import Call, Piece
from enginewright.passes.ir.value_name import ValueName

LAYER = "layers.0"
LEAVES = frozenset({f"{LAYER}.norm", f"{LAYER}.q", f"{LAYER}.k", f"{LAYER}.o", f"{LAYER}.act", "embed", "head"})


def call(key: int, op: str, where: str, reads: list[str], writes: list[str], **more: object) -> Call:
    paths = tuple(where.split(" + ")) if where else ()
    return Call(key, op, paths, tuple(enumerate(reads)), tuple(enumerate(writes)), **more)  # type: ignore[arg-type]


def places(calls: list[Call], logits: str = "logits") -> dict[str, tuple[int, bool, int]]:
    return {str(t.name): (t.key, t.before, t.slot) for t in find_probes(calls, LEAVES, logits)}  # type: ignore[misc]


def test_a_leaf_in_many_calls_has_one_input_and_one_output() -> None:
    calls = [
        call(0, "aten.embedding", "embed", [], ["x"]),
        call(1, "aten.pow", f"{LAYER}.norm", ["x"], ["p"]),
        call(2, "aten.mul", f"{LAYER}.norm", ["x", "p"], ["n"]),
        call(3, "aten.linear", f"{LAYER}.q", ["n"], ["logits"]),
    ]
    assert places(calls) == {
        "output of embed": (0, False, 0),
        f"input of {LAYER}.norm": (0, False, 0),  # where it is made
        f"output of {LAYER}.norm": (2, False, 0),
        f"input of {LAYER}.q": (2, False, 0),
        f"output of {LAYER}.q": (3, False, 0),
        "logits": (3, False, 0),
    }


def test_a_fused_product_has_its_linears_columns() -> None:
    pieces = (Piece(f"{LAYER}.q", 0, 8), Piece(f"{LAYER}.k", 8, 12))
    calls = [
        call(0, "aten.embedding", "embed", [], ["x"]),
        call(1, "linear", f"{LAYER}.q + {LAYER}.k", ["x"], ["qk"], pieces=pieces),
        call(2, "rope", LAYER, ["qk"], ["logits"]),
    ]
    columns = {str(t.name): t.columns for t in find_probes(calls, LEAVES, "logits")}
    assert columns[f"output of {LAYER}.q"] == (0, 8) and columns[f"output of {LAYER}.k"] == (8, 12)
    by_name = places(calls)
    assert by_name[f"output of {LAYER}.q"] == by_name[f"output of {LAYER}.k"] == (1, False, 0)
    assert by_name[f"input of {LAYER}.q"] == by_name[f"input of {LAYER}.k"] == (0, False, 0)  # where it is made


def test_a_product_that_does_more_is_known_by_what_comes_out() -> None:
    pieces = (Piece(f"{LAYER}.o", 0, 8),)
    embed = call(0, "aten.embedding", "embed", [], ["x"])
    active = call(1, "linear", f"{LAYER}.act + {LAYER}.o", ["x"], ["y"], pieces=pieces, epilogue="activation")
    added = call(2, "linear", f"{LAYER}.o + {LAYER}", ["x", "x"], ["y"], pieces=pieces, epilogue="residual")
    norm = call(3, "rms_norm", f"{LAYER}.norm + {LAYER}", ["y"], ["logits"])
    assert places([embed, active, norm])[f"output of {LAYER}.act"] == (1, False, 0)
    assert f"output of {LAYER}.o" not in places([embed, active, norm])
    by_name = places([embed, added, norm])
    assert by_name[f"output of {LAYER}.o"] == (2, False, 0)  # without the residual
    assert by_name[f"input of {LAYER}.norm"] == (2, False, 0)  # with it, where it is made
    (product, total) = [t for t in find_probes([embed, added, norm], LEAVES, "logits") if t.key == 2][:2]
    assert product.residual and not total.residual  # in this order: the sum is made of the product
    both = call(2, "linear", f"{LAYER}.act + {LAYER}.o", ["x", "x"], ["y"], pieces=pieces, epilogue="both")
    assert not {f"output of {LAYER}.o", f"output of {LAYER}.act"} & places([embed, both, norm]).keys()


def test_sums_within_norms_and_keys_in_caches() -> None:
    calls = [
        call(0, "aten.embedding", "embed", [], ["x"]),
        call(1, "add_rms_norm_quantize", f"{LAYER}.q + {LAYER}.norm", ["x", "x"], ["v", "s", "u", "sum"],
             owner=f"{LAYER}.norm"),
        call(2, "rope_kv_write", LAYER, ["sum", "sum", "sum", "x"], ["turned"]),
        call(3, "paged_attention", LAYER, ["turned"], ["logits"]),
    ]  # fmt: skip
    by_name = {str(t.name): t for t in find_probes(calls, LEAVES, "logits")}
    total = by_name[f"input of {LAYER}.norm"]
    assert (total.key, total.before, total.slot, total.added) == (1, False, 3, True)
    assert f"output of {LAYER}.norm" not in by_name
    key = by_name[f"key, as attention gets it, of {LAYER}"]
    assert (key.key, key.before, key.cached) == (2, False, True)
    query, outcome = by_name[f"query, as attention gets it, of {LAYER}"], by_name[f"what attention gives in {LAYER}"]
    assert (query.key, query.before) == (2, False)  # where it is made
    assert (outcome.key, outcome.before) == (3, False)


def test_a_module_that_runs_twice_is_not_compared() -> None:
    calls = [
        call(0, "aten.embedding", "embed", [], ["x"]),
        call(1, "linear", f"{LAYER}.q", ["x"], ["a"], pieces=(Piece(f"{LAYER}.q", 0, 4),)),
        call(2, "linear", f"{LAYER}.q", ["a"], ["b"], pieces=(Piece(f"{LAYER}.q", 0, 4),)),
        call(3, "aten.add", "", ["a", "b"], ["logits"]),
    ]
    assert f"output of {LAYER}.q" not in places(calls)


def test_the_calls_between_agreeing_values_and_a_fault() -> None:
    calls = [
        call(0, "aten.embedding", "embed", [], ["x"]),
        call(1, "linear", f"{LAYER}.q", ["x"], ["q"], pieces=(Piece(f"{LAYER}.q", 0, 4),)),
        call(2, "rope_table", "rotary", [], ["table"]),
        call(3, "rope", LAYER, ["q", "table"], ["turned"]),
        call(4, "attention", LAYER, ["turned", "turned", "turned"], ["logits"]),
    ]
    probes = find_probes(calls, LEAVES, "logits")
    known = {probe.name for probe in probes}
    between = area(calls, probes, ValueName(LAYER, "context"), known)
    assert [c.key for c in between] == [4]
    some = known - {ValueName(LAYER, "query"), ValueName(LAYER, "key"), ValueName(LAYER, "value")}
    assert [c.key for c in area(calls, probes, ValueName(LAYER, "context"), some)] == [2, 3, 4]
