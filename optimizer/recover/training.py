"""The training loop: AdamW on the divergence from the source, step by step, with a state that can be saved and
restored.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch

from enginewright.runtime.shared.errors import SourceError, VerificationError
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .distillation import Teacher, loss_of, measure
from .folder import Checkpoint
from .hidden_states import HiddenStates
from .options import Measured, RecoverOptions
from .sequences import Sequences
from .trainable import TrainableProgram

_BETAS = (0.9, 0.95)
_SHOWN = 20
"""The number of last steps over which progress shows the mean loss and speed."""


class Training:
    """The training of a module.

    Args:
        module: the module to train.
        teacher: the source.
        sequences: the sequences to train on and to measure with.
        options: see ``RecoverOptions``.
    """

    def __init__(
        self, module: TrainableProgram, teacher: Teacher, sequences: Sequences, options: RecoverOptions
    ) -> None:
        self._module, self._teacher, self._sequences, self._options = module, teacher, sequences, options
        self._hidden = HiddenStates(module.program, teacher.model) if options.hidden else None
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=options.learning_rate, betas=_BETAS)
        self.step = 0
        self.losses: list[float] = []
        self.measured: list[Measured] = []
        self.trained_tokens = 0
        self.seconds = 0.0

    def run(self, progress: Progress, checkpoint: Callable[[Checkpoint], None]) -> None:
        """Trains to the last step, and measures before the first step, at each checkpoint and at the end.

        After Ctrl-C the current step is finished, and ``checkpoint`` is called.

        Args:
            progress: called with the stages "train" and "measure".
            checkpoint: called with each checkpoint.

        Raises:
            VerificationError: the loss isn't a finite number.
            KeyboardInterrupt: at Ctrl-C.
        """
        if not self.measured:
            self._measure(progress)
        with _interrupts_at_the_end_of_a_step() as interrupted:
            while self.step < self._options.steps:
                self._take_step(progress)
                last = self.step == self._options.steps
                if last or self.step % self._options.checkpoint_every == 0:
                    self._measure(progress)
                if last or interrupted() or self.step % self._options.checkpoint_every == 0:
                    checkpoint(self.state())
                if interrupted():
                    raise KeyboardInterrupt

    def state(self) -> Checkpoint:
        """Returns the state that the next step depends on; its tensors are those in training."""
        weights, moments = self._module.named_weights(), {}
        for name, parameter in weights.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                moments[f"{name}.{kind}"] = value
        figures = {"losses": self.losses, "measured": [asdict(m) for m in self.measured]}
        return Checkpoint(self.step, dict(weights), moments, figures)

    def take_up(self, found: Checkpoint) -> None:
        """Restores the state of the checkpoint ``found``. Raises SourceError if it belongs to another module."""
        weights = self._module.named_weights()
        kinds = ("step", "exp_avg", "exp_avg_sq")
        moments = {f"{name}.{kind}" for name in weights for kind in kinds}
        if set(found.weights) != set(weights) or set(found.moments) != moments:
            raise SourceError(
                f"the checkpoint after {found.step} steps has other weights than this model",
                hint="It is of another model or another recipe: recover the model anew, with --force.",
            )
        for name, parameter in weights.items():
            shapes = [found.weights[name].shape, *(found.moments[f"{name}.{k}"].shape for k in kinds[1:])]
            if any(shape != parameter.shape for shape in shapes):
                raise SourceError(
                    f"the checkpoint after {found.step} steps: {name} is {tuple(shapes[0])}, and this model's is "
                    f"{tuple(parameter.shape)}",
                    hint="It is of another model or another recipe: recover the model anew, with --force.",
                )
        for name, parameter in weights.items():
            parameter.data.copy_(found.weights[name])
            self._optimizer.state[parameter] = {kind: found.moments[f"{name}.{kind}"] for kind in kinds}
        self._module.weights_moved()
        self.step = found.step
        self.losses = [float(x) for x in found.figures["losses"]]
        self.measured = [Measured(**m) for m in found.figures["measured"]]

    @property
    def tokens_per_second(self) -> float:
        """The speed of training, without the measurements."""
        return self.trained_tokens / self.seconds if self.seconds else 0.0

    def _take_step(self, progress: Progress) -> None:
        start, options = time.perf_counter(), self._options
        batch = self._sequences.batch(self.step, options)
        tokens = sum(len(s) for s in batch)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        size = -(-len(batch) // options.accumulate)
        for at in range(0, len(batch), size):
            part = batch[at : at + size]
            loss = loss_of(self._module, self._teacher, part, options.temperature, self._hidden, options.hidden)
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), options.clip)
        if not (math.isfinite(total) and bool(torch.isfinite(norm))):
            raise VerificationError(
                f"recovery has diverged: after {self.step} steps the loss is {total:.3g} and its gradient "
                f"{float(norm):.3g}",
                hint="Take a lower learning rate (--lr), or a longer warmup.",
            )
        for group in self._optimizer.param_groups:
            group["lr"] = options.rate(self.step)
        self._optimizer.step()
        self._module.weights_moved()
        self.step += 1
        self.losses.append(total)
        self.trained_tokens += tokens
        self.seconds += time.perf_counter() - start
        recent = self.losses[-_SHOWN:]
        detail = f"loss {sum(recent) / len(recent):.4f}, {self.tokens_per_second:,.0f} tokens/s"
        progress(ProgressEvent("train", self.step, options.steps, detail))

    def _measure(self, progress: Progress) -> None:
        result = measure(self._module, self._teacher, self._sequences.held_out, self.step)
        self.measured.append(result)
        detail = f"KL {result.kl:.4f}, perplexity {result.perplexity:.4g} (source {result.source_perplexity:.4g})"
        progress(ProgressEvent("measure", self.step, self._options.steps, detail))


@contextmanager
def _interrupts_at_the_end_of_a_step() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True after Ctrl-C, in the place of an exception within a step; a second Ctrl-C
    raises it.
    """
    seen = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before: Any = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
