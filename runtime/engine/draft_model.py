"""A draft model, which proposes tokens for the target model to verify: ``LLM(speculate=BUNDLE)``.

It is speculative decoding (Leviathan et al. 2023; Chen et al. 2023) without rejection sampling. At each position, both
models draw with the request's own random number, so that they often draw the same token (a coupling: Daliri et al.
2024). The target model draws the same tokens as without a draft.

The draft model has its own KV cache. Before it proposes, it computes the tokens that it hasn't seen; after a rejected
token, it returns to the last accepted one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from ..bundle.reader import Bundle
from ..bundle.tokenizer_files import TokenizerFiles
from ..executors.base import Executor
from ..executors.open import check_code, exact_targets, make_executor, target_groups
from ..kv_cache.cache_manager import CacheManager
from ..kv_cache.candidate import Candidate
from ..kv_cache.kinds.table import cache_block_bytes
from ..kv_cache.pool_plan import PoolPlan, enough_for_windows, plan_pools
from ..ranks.partition import Partition
from ..requests.proposers import NOTHING, Proposal, ProposalKind, TimedProposer
from ..requests.request import Generation, Request
from ..scheduler.base import Chunk
from ..scheduler.drafts import NOT_EXACT
from ..scheduler.step_inputs import StepInputs
from ..scheduler.step_times import DecodeTimes
from ..shared.contracts import DRAFT_ROWS, NO_TOKEN
from ..shared.errors import BundleError, CapacityError, EnginewrightError, RequestError
from ..shared.memory import format_bytes
from ..text.tokenizer import Tokenizer
from .proposer_setup import ProposerSetup

CHUNK = 256
"""The most tokens of a request that the draft model computes between two steps of the target model to catch up."""
_TRIED = 16
"""The number of steps from which on the measured time is used.

Before that, steps count as free, so that they are tried.
"""


class _Follower(msgspec.Struct, eq=False):
    """The draft model's copy of a request.

    Attributes:
        request: the copy, with the draft model's blocks; its last tokens may be proposed ones.
        known: the number of tokens that come from the target model.
        ran: True if a step has written to its blocks.
    """

    request: Request
    known: int
    ran: bool = False


class DraftModel(TimedProposer):
    """A proposer that draws tokens with a draft model.

    Args:
        executor: the draft model's executor, with its KV cache; closed with the proposer.
        context: the most tokens of a request that the draft model can process.
        name: the name shown to users.
        prefix_cache: True if a request reuses the blocks of earlier requests of the same tenant.
        clock: returns seconds; measures the draft model's steps.
    """

    name = "model"
    kind = ProposalKind(name, 0, 0.7)

    def __init__(
        self,
        executor: Executor,
        context: int,
        name: str = "",
        *,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor, self._context, self._model, self._clock = executor, context, name, clock
        self.cache = CacheManager(
            executor.cache_groups,
            executor.blocks,
            executor.caps,
            step_tokens=CHUNK,
            prefix_cache=prefix_cache,
        )
        self._inputs = StepInputs(self.cache.groups)
        self._followers: dict[Request, _Follower] = {}
        self._times, self._steps = DecodeTimes(), 0

    def seconds(self, rows: int) -> float:
        return self._times.seconds(min(rows, DRAFT_ROWS)) if self._steps >= _TRIED else 0.0

    def behind(self, request: Generation) -> float:
        follower = self._followers.get(request)
        if follower is not None:
            computed = min(follower.request.computed, follower.known)
        elif self.cache.index is not None:
            computed = self.cache.index.find(request.namespace, request.items, len(request.items) - 1).tokens
        else:
            computed = 0
        lacking = len(request.tokens) - computed
        return lacking * self.seconds(DRAFT_ROWS) / DRAFT_ROWS if lacking > DRAFT_ROWS else 0.0

    def takes(self, request: Generation) -> bool:
        """Returns False for a request whose token rules change with each token, as the draft model can't follow
        them.
        """
        return request.rules is None or not request.rules.changing

    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        if self.off is None:
            try:
                return [Proposal(tokens, self.kind) for tokens in self._draw(wanted)]
            except Exception as e:  # noqa: BLE001  whatever it is, no request needs a draft
                self._switch_off(e)
        return [NOTHING] * len(wanted)

    def release(self, request: Request) -> None:
        if (follower := self._followers.pop(request, None)) is not None:
            self.cache.release(follower.request)

    def forget(self, tenant: str | None) -> None:
        self.cache.forget(tenant)

    def describe(self) -> dict[str, Any]:
        plan = PoolPlan.from_blocks(self._executor.cache_groups, self._executor.blocks)
        about: dict[str, Any] = {"model": self._model, "kv_cache_bytes": plan.bytes}
        about["kv_blocks_free"] = {name: pool.free_blocks for name, pool in self.cache.pools.items()}
        return about | self._times.describe()

    def close(self) -> None:
        """Closes the draft model's executor."""
        self._executor.close()

    def _draw(self, wanted: Sequence[tuple[Generation, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        chunks: list[tuple[int, Chunk]] = []  # of which request, and what is computed of it next
        tokens_left = CHUNK
        for i, (request, length) in enumerate(wanted):
            if (its := self._following(request, length)) is not None and tokens_left:
                count = min(its.remaining, tokens_left)
                chunks.append((i, Chunk(its, its.computed, count)))
                tokens_left -= count
        while chunks:
            drawn = iter(self._run([chunk for _, chunk in chunks]))
            drawing, chunks = [(i, chunk.request) for i, chunk in chunks if chunk.samples], []
            for i, drafting_request in drawing:
                token = next(drawn)
                if token == NO_TOKEN:
                    raise EnginewrightError("its logits aren't finite")
                drafting_request.tokens.append(token)
                drafts[i].append(token)
                if len(drafts[i]) < wanted[i][1] and token not in wanted[i][0].end_tokens:
                    chunks.append((i, Chunk(drafting_request, drafting_request.computed, 1)))
        return drafts

    def _run(self, chunks: Sequence[Chunk]) -> list[int]:
        """Runs a step of the draft model; returns the tokens drawn for the chunks that contain their request's last
        token.
        """
        step = self._inputs.build(chunks)
        self.cache.hand_over(step)
        began = self._clock()
        output = self._executor.submit(step).result()
        if len(step.ids) <= DRAFT_ROWS:
            self._times.took(len(step.ids), self._clock() - began)
            self._steps += 1
        self.cache.landed(step)
        self.cache.ran(step)
        for chunk in chunks:
            chunk.request.computed = chunk.start + chunk.count
        return [] if output.tokens is None else output.tokens.tolist()

    def _following(self, request: Generation, length: int) -> Request | None:
        """Returns the draft model's copy of a request, with blocks for ``length`` proposed tokens; None if they don't
        fit.
        """
        if len(request.tokens) + length > self._context:
            return None
        follower = self._followers.get(request)
        if follower is not None and not self._go_back(follower, request):
            self.release(request)
            follower = None
        if follower is None and (follower := self._begun(request)) is None:
            return None
        drafting = follower.request
        if not self.cache.grow(drafting, len(drafting.tokens) + length - 1):
            return None
        follower.ran = True
        return drafting

    def _begun(self, request: Generation) -> _Follower | None:
        params = replace(request.params, logprobs=None, prompt_logprobs=None)
        drafting = Generation(request.tokens, params, max_tokens=request.max_tokens, **request.identity)
        drafting.prompt_length, drafting.seed, drafting.rules = request.prompt_length, request.seed, request.rules
        others = [follower.request for follower in self._followers.values()]
        if not self.cache.begin(Candidate(drafting, others)):
            return None
        self._followers[request] = follower = _Follower(drafting, len(request.tokens))
        return follower

    def _go_back(self, follower: _Follower, request: Request) -> bool:
        """Sets the copy to the request's tokens; at least the last of them must still be computed.

        Returns False if the caches can't return to an earlier token: then the copy must begin again.
        """
        drafting, known = follower.request, request.tokens
        end = min(drafting.computed, len(known) - 1)
        at = min(follower.known, end)
        while at < end and drafting.tokens[at] == known[at]:
            at += 1
        if at < drafting.computed and not self.cache.goes_back:
            return False
        drafting.computed = at
        drafting.tokens[follower.known :] = known[follower.known :]
        follower.known = len(known)
        if follower.ran:
            self.cache.after_step(drafting)
        return True

    def _switch_off(self, cause: Exception) -> None:
        message = cause.message if isinstance(cause, EnginewrightError) else repr(cause)
        self.off = f"it failed: {message}"
        self.cache.drop_copies()
        for request in list(self._followers):
            self.release(request)
        with suppress(RuntimeWarning):  # made an error, it would end the step, and with it all requests
            warnings.warn(f"speculate: {self._model}: {self.off}; it proposes no more", RuntimeWarning, stacklevel=2)


def open_draft(setup: ProposerSetup) -> DraftModel | None:
    """Opens the draft model whose bundle ``setup.speculate`` names; returns None for None, "auto" and "lookup".

    The draft model's KV cache and the target model's hold the same number of tokens.

    Raises:
        BundleError: the bundle is missing or damaged, or doesn't have the target.
        TrustError: the target has code, and only the other bundle's is trusted.
        RequestError: the vocabularies differ, or the target can't verify drafts of a model.
        CapacityError: the weights and one block of both KV caches don't fit into the memory.
    """
    speculate, bundle, target = setup.speculate, setup.bundle, setup.target
    context, config, placement = setup.context, setup.config, setup.placement
    if speculate in (None, "auto", "lookup"):
        return None
    if target not in exact_targets(bundle):
        raise RequestError(f"speculate: target {target!r} can't verify drafts of another model", hint=NOT_EXACT)
    try:
        draft = Bundle.open(speculate, bundle.trust if bundle.trust == "code" else None)
        groups = target_groups(draft, target, context) if draft.target(target) else ()
        check_code(draft, target)
        tokenizer = draft.tokenizer_files()
    except BundleError as e:
        raise BundleError(f"speculate: {e.message}", hint=f'{e.hint or ""} Or pass "auto".'.strip()) from e
    if (problem := _disagreement(bundle, draft, tokenizer)) is not None:
        hint = "Pass a bundle of the same family of models, such as the same model in int4."
        raise RequestError(f"speculate: {draft.path} has another vocabulary than {bundle.path}: {problem}", hint=hint)
    weights = sum(draft.tensor(use.name).bytes for use in draft.program(target).weights)
    budget = setup.budget
    drafts = (group.model_copy(update={"name": f"draft {group.name}"}) for group in groups)
    both = (*target_groups(bundle, target, context, placement), *drafts)
    step_tokens = max(config.prefill_tokens, CHUNK)
    enough = enough_for_windows(both, config.max_requests, step_tokens, states_memory=config.states_memory)
    try:
        plan = plan_pools(both, budget - weights, config.max_requests * context, 0, enough)
    except CapacityError as e:
        least = weights + sum(cache_block_bytes(g) for g in both)
        raise CapacityError(
            f"speculate: memory of {format_bytes(budget)} doesn't hold the draft model's weights of "
            f"{format_bytes(weights)} and a block of both KV caches",
            hint=f"Pass memory of {least} bytes ({format_bytes(least)}) or more, a smaller draft model, or no draft.",
        ) from e
    blocks = {g.name: plan.blocks[f"draft {g.name}"] for g in groups}
    try:
        executor = make_executor(draft, target, blocks, context, replace(placement, partition=Partition(), ray=None))
    except (BundleError, CapacityError) as e:
        raise e.reworded(f"speculate: {e.message}", hint=e.hint) from e
    most = min(context, draft.model.context_length)
    model = DraftModel(executor, most, draft.model.name, prefix_cache=config.prefix_cache)
    model.bytes = weights + sum(cache_block_bytes(g) * blocks[g.name] for g in groups)
    return model


def _disagreement(bundle: Bundle, draft: Bundle, tokenizer: TokenizerFiles) -> str | None:
    """Returns a message about a difference of two vocabularies, in size or in a token's text; None if they are equal.

    Args:
        bundle: the target model's bundle.
        draft: the draft model's bundle.
        tokenizer: the tokenizer of the target model.
    """
    sizes = draft.model.vocab_size, bundle.model.vocab_size
    if sizes[0] != sizes[1]:
        return f"{sizes[0]} tokens, and {sizes[1]} there"
    model_files = bundle.tokenizer_files()
    if model_files.tokenizer_json == tokenizer.tokenizer_json:
        return None
    if model_files.tokenizer_json is None or tokenizer.tokenizer_json is None:
        return "one of the two has no tokenizer"
    draft_tokens, model_tokens = Tokenizer(tokenizer).vocabulary, Tokenizer(model_files).vocabulary
    for index in sorted(draft_tokens.keys() | model_tokens.keys()):
        if draft_tokens.get(index) != model_tokens.get(index):
            return f"token {index} is {draft_tokens.get(index)!r}, and {model_tokens.get(index)!r} there"
    return None
