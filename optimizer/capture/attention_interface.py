"""The attention function and the mask function through which every model of transformers is captured.

transformers lets a caller register both under a name. The mask function checks that the model's mask is causal or shows
all tokens, perhaps within a window, and returns an ``AttentionMask`` instead of a tensor. The attention function
receives that object, and becomes a single ``ew.attention`` in the traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import enginewright.passes.ops  # noqa: F401  defines torch.ops.ew
from enginewright.runtime.shared.errors import UnsupportedModelError

NAME = "enginewright"
"""The attention implementation under which our functions are registered in transformers."""

# What models pass along that doesn't change what attention means: it is said by position embeddings that are applied
# already, by the mask, or is about caches and outputs that capture leaves off.
_WITHOUT_MEANING = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)


@dataclass(frozen=True)
class AttentionMask:
    """A mask in the form that ``ew.attention`` supports, in place of the mask's tensor.

    Some models slice a mask to fit the keys; that returns the same object. A model that computes its attention itself,
    and so reads the mask, gets the tensor.

    Attributes:
        window: the sliding window in tokens; 0 for full attention.
        causal: False if a query sees keys on both sides.
    """

    window: int
    causal: bool = True

    def tensor(self) -> torch.Tensor:
        """Returns the mask to add to scores, [1, 1, T, T]: 0 for visible keys, otherwise the lowest 32-bit float."""
        capture = _CAPTURE.get()
        if self.window:
            capture.windows.add(self.window)
        positions = torch.arange(capture.tokens)  # type: ignore[arg-type]  # a SymInt while the model is traced
        seen = seen_keys(positions[:, None], positions[None, :], self.window, causal=self.causal)
        least = torch.full((), torch.finfo(torch.float32).min)
        return torch.where(seen, torch.zeros(()), least)[None, None]

    def __getitem__(self, index: object) -> AttentionMask:
        return self

    def __lt__(self, other: float) -> torch.Tensor:
        return self.tensor() < other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda a: a.tensor() if isinstance(a, cls) else a, (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class OtherMask:
    """A mask that can't be compiled, in place of the mask's tensor. ``problem`` describes it.

    It is refused only if a layer uses it, because some models make masks that no layer uses.
    """

    problem: str

    def refuse(self, where: str) -> NoReturn:
        """Raises UnsupportedModelError for the mask, naming the place ``where``."""
        raise UnsupportedModelError(
            f"{where}: {self.problem}",
            hint="Chunked and block-wise attention can't be compiled.",
        )

    def __getitem__(self, index: object) -> OtherMask:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, cls):
                one.refuse("the model")
        return NotImplemented


@dataclass
class AttentionCapture:
    """The record of the attention calls of one forward pass.

    Attributes:
        model_layers: the number of layers in the model's configuration. A second attention call of a layer gets a
            higher number, since each call has its own keys and values.
        whole_texts: True if requests are never cut into chunks, so that a token may see later ones.
        paths: ``id`` of a module -> its path, for messages.
        q_start: [B+1], the packing of the pass, which all calls use.
        tokens: the number of tokens (T).
        layers: the number of the cache of each call, in order.
        windows: the windows of masks whose tensors the model computed with.
        running: the modules with a layer's number that are being called, innermost last.
        called: all layers of which a module was called.
    """

    model_layers: int = 0
    whole_texts: bool = False
    paths: dict[int, str] = field(default_factory=dict)
    q_start: torch.Tensor | None = None
    tokens: int | torch.SymInt = 0
    layers: list[int] = field(default_factory=list)
    windows: set[int] = field(default_factory=set)
    running: list[torch.nn.Module] = field(default_factory=list)
    called: set[int] = field(default_factory=set)

    def enter(self, module: torch.nn.Module) -> None:
        """Notes that a module with a layer's number is being called."""
        self.running.append(module)
        self.called.add(module.layer_idx)  # type: ignore[arg-type]  # an int

    def leave(self) -> None:
        """Notes that the innermost module has returned."""
        self.running.pop()

    @property
    def bounds(self) -> torch.Tensor:
        """The bounds of the requests in the forward pass, ``q_start`` [B+1]."""
        assert self.q_start is not None, "begin_forward sets it"
        return self.q_start

    @property
    def where(self) -> str:
        """The path of the innermost module with a layer's number that is being called."""
        return path_of(self.running[-1]) if self.running else "the model"

    def recurrent_layer(self) -> int:
        """Returns the number of the layer whose recurrent function is being called.

        Raises UnsupportedModelError if no module with a layer's number (``layer_idx``) is being called.
        """
        if not self.running:
            raise UnsupportedModelError("a recurrent function is called outside of a layer (layer_idx)")
        layer: int = self.running[-1].layer_idx  # type: ignore[assignment]  # an int, or it weren't in the list
        return layer


NOT_CAUSAL = "neither causal nor causal within a sliding window"

_CAPTURE: ContextVar[AttentionCapture] = ContextVar("enginewright_attention_capture")


@contextmanager
def capturing(model: torch.nn.Module, *, whole_texts: bool = False) -> Iterator[AttentionCapture]:
    """Makes ``model`` use our attention within the block; yields the record of its last forward pass.

    ``whole_texts``: see ``AttentionCapture``.
    """
    config = getattr(model, "config", None)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0) if config is not None else 0
    paths = {id(module): path for path, module in model.named_modules()}
    capture = AttentionCapture(layers, whole_texts, paths)
    token = _CAPTURE.set(capture)
    hooks = [
        hook
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        for hook in (
            module.register_forward_pre_hook(lambda module, _: capture.enter(module)),
            module.register_forward_hook(lambda *_: capture.leave(), always_call=True),
        )
    ]
    try:
        yield capture
    finally:
        _CAPTURE.reset(token)
        for hook in hooks:
            hook.remove()


def current_capture() -> AttentionCapture:
    """Returns the record of the forward pass that is being captured."""
    return _CAPTURE.get()


def begin_forward(q_start: torch.Tensor, tokens: int | torch.SymInt) -> None:
    """Resets the record of attention calls before a forward pass. It must run within ``capturing``.

    Args:
        q_start: [B+1], the packing that the attention calls of the pass read.
        tokens: the number of tokens of the pass.
    """
    capture = _CAPTURE.get()
    capture.q_start, capture.tokens = q_start, tokens
    capture.layers.clear()
    capture.windows.clear()
    capture.called.clear()
    capture.running.clear()


def path_of(module: torch.nn.Module) -> str:
    """Returns the path of a module in the captured model; the name of the module's class if it isn't part of
    the model.
    """
    capture = _CAPTURE.get(None)
    return (capture.paths.get(id(module)) if capture else None) or type(module).__name__


def register() -> None:
    """Makes the implementation ``NAME`` known to transformers. May be called again."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_function)


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionMask | OtherMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers: query [1, Nq, T, D], key [1, Nkv, T, D], value [1, Nkv, T, Dv] -> [1, T, Nq,
    Dv].

    It returns (result, None). Raises UnsupportedModelError, naming the module and the argument, for arguments that
    ``ew.attention`` doesn't have.
    """
    capture = _CAPTURE.get()
    where = path_of(module)
    if isinstance(attention_mask, OtherMask):
        attention_mask.refuse(where)
    mask = _known_mask(attention_mask, module, where)
    if not mask.causal and not capture.whole_texts:
        raise UnsupportedModelError(
            f"{where}: its mask is {NOT_CAUSAL}: a token sees those after it",
            hint="A language model that generates text is causal. An encoder is exported by its own class, such as "
            "...Model or ...ForSequenceClassification in architectures of config.json.",
        )
    if sliding_window and mask.causal and sliding_window != mask.window:
        raise UnsupportedModelError(
            f"{where}: sliding_window is {sliding_window}, but its mask has the window {mask.window}"
        )
    neutral = {"dropout": dropout == 0.0}
    is_causal = others.pop("is_causal", None)
    if mask.causal:  # otherwise the mask alone decides
        neutral |= {"is_causal": is_causal in (None, True)}
        neutral["module.is_causal"] = getattr(module, "is_causal", True) is not False
    neutral |= {k: v is None or v is False for k, v in others.items() if k not in _WITHOUT_MEANING}
    if strange := [name for name, fine in neutral.items() if not fine]:
        raise UnsupportedModelError(
            f"{where}: attention is called with {', '.join(strange)}, which ew.attention has no meaning for"
        )
    layer = _cache_number(capture, module, where)

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, N, D]
    scale = float(scaling) if scaling is not None else float(q.shape[-1]) ** -0.5
    both_sides = () if mask.causal else (False,)
    out = torch.ops.ew.attention(
        q, k, v, capture.bounds, layer, scale, mask.window, float(softcap or 0.0), s_aux, slopes, *both_sides
    )
    return out[None], None


def _known_mask(mask: AttentionMask | torch.Tensor | None, module: torch.nn.Module, where: str) -> AttentionMask:
    """Returns the mask of an attention call.

    Without a mask, a query sees every token if the module's is_causal is False.

    Raises UnsupportedModelError for a tensor, and for a missing mask if the module has no is_causal.
    """
    if isinstance(mask, AttentionMask):
        return mask
    if mask is None and getattr(module, "is_causal", None) is False:
        return AttentionMask(0, causal=False)
    kind = "no mask" if mask is None else "a mask of its own"
    raise UnsupportedModelError(
        f"{where}: attention is called with {kind} (attention_mask), so it can't be known which tokens are seen",
        hint="Only models that take their masks from transformers' mask interface can be captured.",
    )


def _cache_number(capture: AttentionCapture, module: torch.nn.Module, where: str) -> int:
    """Returns the number of the cache of an attention call: the module's layer for its first call, then new numbers.

    A module that several layers share has no number (``layer_idx`` is None or -1). It gets the number of the layer that
    its path ``where`` names, the first one that has it. Without a cache, the number only has to differ from others.

    Raises UnsupportedModelError if neither the module nor its path has a number.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer < 0:
        layer = next((int(p) for p in where.split(".") if p.isdigit() and int(p) < capture.model_layers), None)
    if layer is None and capture.whole_texts:
        layer = 0
    if layer is None:
        raise UnsupportedModelError(
            f"{where} has no layer_idx, so it can't be known that each layer attends",
            hint="Give each attention module the number of its layer.",
        )
    if layer in capture.layers:
        layer = max(capture.model_layers, *(number + 1 for number in capture.layers))
    capture.layers.append(layer)
    return layer


def mask_function(
    *args: Any, mask_function: Callable[..., Any], config: Any = None, local_size: int | None = None, **others: Any
) -> AttentionMask | OtherMask:
    """Makes a mask for transformers: an ``AttentionMask``, or an ``OtherMask`` if it can't be compiled.

    The model's own ``mask_function`` (batch, head, query, key) is evaluated to find out what it masks.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 4096)
    windows = [w for w in (local_size, getattr(config, "sliding_window", None)) if isinstance(w, int) and w > 0]
    known = known_mask(mask_function, longest=longest, windows=windows)
    if known is None:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        return OtherMask(f"the mask {name} of {type(config).__name__} is {NOT_CAUSAL}")
    return known


def known_mask(mask: Callable[..., Any], *, longest: int, windows: list[int]) -> AttentionMask | None:
    """Identifies a mask. Returns None if it is neither causal nor bidirectional, over all tokens or within a window.

    Args:
        mask: returns True where a query sees a key: mask(batch, head, query, key). It is evaluated at small positions,
            around multiples of ``windows`` and of their halves, and around powers of two, where chunks and blocks would
            show.
        longest: the largest position.
        windows: the windows that the mask may have.
    """
    points = set(range(17))
    halves = [(w + 1) // 2 for w in windows]  # a window of both sides may be stated by its whole size
    for center in [w * n for w in (*windows, *halves) for n in (1, 2, 3)]:
        points.update(range(max(center - 3, 0), center + 4))
    for center in [2**n for n in range(5, longest.bit_length() + 1)]:
        points.update(range(center - 2, center + 3))
    # The model is being traced: evaluate with real tensors, out of sight of the tracer.
    with _disable_current_modes(), torch.no_grad():
        grid = torch.tensor(sorted(points))
        query, key = grid[:, None], grid[None, :]
        zero = torch.zeros((), dtype=torch.long)
        try:
            seen = torch.as_tensor(mask(zero, zero, query, key), dtype=torch.bool).expand(len(grid), len(grid))
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
            return None  # it depends on the tokens, whose values are not known
        if isinstance(seen, FakeTensor):
            return None
        for known in (
            *(AttentionMask(window) for window in (0, *windows)),
            AttentionMask(0, causal=False),
            *(AttentionMask(w + more, causal=False) for w in (*windows, *halves) for more in (0, 1)),
        ):
            if torch.equal(seen, seen_keys(query, key, known.window, causal=known.causal)):
                return known
    return None


def seen_keys(query: torch.Tensor, key: torch.Tensor, window: int, *, causal: bool) -> torch.Tensor:
    """Returns a boolean tensor: True where a query sees a key, by the masks of ``ew.attention``.

    Args:
        query, key: positions, which are broadcast.
        window: the sliding window in tokens; 0 for full attention.
        causal: False if a query sees keys on both sides.
    """
    if causal:
        seen = key <= query
        return seen & (key > query - window) if window else seen
    distance = (key - query).abs()
    return distance < window if window else torch.ones_like(distance, dtype=torch.bool)
