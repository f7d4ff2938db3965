"""The context of tasks: the parts of the engine that they use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..requests.request import Common
from ..requests.request_class import NO_TARGETS, RequestClass
from ..requests.request_options import RequestOptions
from ..shared.contracts import ModelInfo, PoolingInfo
from ..shared.errors import BundleError, RequestError, shown
from ..text.tokenizer import Tokenizer
from . import arguments
from .arguments import Encoded, Prompt

if TYPE_CHECKING:
    from ..executors.base import Executor
    from ..scheduler.continuous import ContinuousScheduler

Shared = TypeVar("Shared")

GENERATE: Literal["generate"] = "generate"
Kind = Literal["generate", "embed", "rerank", "classify", "token_classify"]
"""The purpose of a model: "generate", or the task of a model that pools, such as "embed"."""

METHODS: Mapping[Kind, str] = {
    GENERATE: "generate or chat",
    "embed": "embed",
    "rerank": "score",
    "classify": "classify",
    "token_classify": "classify",
}
"""Kind of a model -> the methods of ``LLM`` that work with it, for errors."""


def kind_of(model: ModelInfo) -> Kind:
    """Returns "generate", or the task of a model that pools, such as "embed"."""
    return GENERATE if model.pooling is None else model.pooling.task


class TaskContext:
    """The engine as tasks see it. Tasks are checked against it, and can store objects in it for later tasks of their
    type.

    Args:
        model: facts about the model, with the most tokens of a request as its context.
        tokenizer: the tokenizer; None if the bundle has none, and then prompts must be token ids.
        scheduler: knows what the KV cache can hold.
        executor: knows the outputs of steps.
        seed: the seed of requests without one; see ``seed_of``.
    """

    def __init__(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        scheduler: ContinuousScheduler,
        executor: Executor,
        seed: int = 0,
    ) -> None:
        self.model, self.scheduler, self.seed = model, scheduler, seed
        self.outputs: Sequence[str] = executor.caps.outputs
        self.target = str(executor.describe()["target"])
        self._tokenizer = tokenizer
        self._shared: dict[Callable[[TaskContext], Any], Any] = {}
        self._making = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises BundleError if there is none."""
        if self._tokenizer is None:
            raise BundleError(
                "the bundle has no tokenizer/tokenizer.json",
                hint="Export the model from a folder with its tokenizer; from Python, pass token ids instead of text.",
            )
        return self._tokenizer

    @property
    def pooling(self) -> PoolingInfo:
        """The facts about the model's vectors, scores or classes. The model must be one that pools."""
        assert self.model.pooling is not None
        return self.model.pooling

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def layers(self) -> int:
        """The number of the model's layers with a cache."""
        return sum(len(group.layers) for group in self.scheduler.groups.values() if not group.holds_ends)

    def encoded(self, prompt: Prompt | Encoded, name: str = "prompt") -> Encoded:
        """Returns the token ids of a prompt. ``name``: its name in errors."""
        if isinstance(prompt, Encoded):
            return prompt
        return arguments.encoded(prompt, name, lambda: self.tokenizer, self.model.context_length - 1)

    def checked_ids(self, prompt: Encoded, most: int | None = None) -> list[int]:
        """Returns the ids of a prompt of at most ``most`` tokens, by default the context. Raises RequestError."""
        context = self.model.context_length
        return arguments.checked_ids(prompt, context if most is None else most, context, self.model.vocab_size)

    def common(self, options: RequestOptions) -> Common:
        """Returns the arguments of a request for these options. Raises RequestError for an unknown class."""
        return {"options": options, "request_class": self._class_of(options)}

    def shared(self, make: Callable[[TaskContext], Shared]) -> Shared:
        """Returns the object that ``make`` returns for this context; it is made once. Its ``close`` is called at the
        end.
        """
        if make not in self._shared:
            with self._making:
                if make not in self._shared:
                    self._shared[make] = make(self)
        shared: Shared = self._shared[make]
        return shared

    def close(self) -> None:
        """Closes the objects of ``shared``."""
        for one in self._shared.values():
            getattr(one, "close", lambda: None)()

    def _class_of(self, options: RequestOptions) -> RequestClass:
        scheduling = self.scheduler.config.scheduling
        if scheduling is not None:
            return scheduling.class_named(options.request_class)
        for name, value in (("request_class", options.request_class), ("priority", options.priority)):
            if value:
                raise RequestError(
                    f"{name}: {shown(value)}, and this LLM serves first come, first served",
                    hint='Open the bundle with LLM(path, scheduling="priority"), or with classes.',
                )
        return NO_TARGETS
