"""The ``ew`` namespace of torch.library, and how an op enters it: reference and fake together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "ew"

# Registrations live as long as their Library object, hence one for the process.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

REFERENCES: dict[str, Callable[..., Any]] = {}
"""Op name -> the plain torch function that defines it, which targets without the op use in its place."""


def register(reference: Callable[..., Any], *, fake: Callable[..., Any]) -> None:
    """Defines the op ``ew::<name of the reference>``, whose schema is the reference's signature.

    Args:
        reference: its implementation on every device: plain torch, pure, with contiguous results that never alias an
            argument.
        fake: infers the results' shapes and types from fake tensors, without specialising T, B or R. It may have only
            some
            of the reference's parameters, by the same names.
    """
    name = reference.__name__
    # SymInt is what may be symbolic; an op's own numbers are fixed when a program is made.
    schema = torch.library.infer_schema(reference, op_name=name, mutates_args=()).replace("SymInt", "int")
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _with_needed(name, fake), lib=_LIBRARY)
    REFERENCES[name] = reference


def _with_needed(op: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes all arguments of the op, and calls ``fake`` with those that it has parameters
    for.
    """
    schema = getattr(getattr(torch.ops, NAMESPACE), op).default._schema
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    needed = tuple(inspect.signature(fake).parameters)
    if unknown := set(needed) - set(defaults):
        raise TypeError(f"the fake of ew.{op} takes {sorted(unknown)}, which the schema lacks")

    def call(*args: object, **kwargs: object) -> Any:
        arguments = defaults | dict(zip(defaults, args, strict=False)) | kwargs  # defaults at the end aren't passed
        return fake(**{name: arguments[name] for name in needed})

    return call


def accumulate_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype for sums over ``x``: float32 for 16-bit floats, otherwise its own."""
    return torch.promote_types(x.dtype, torch.float32)
