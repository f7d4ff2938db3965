"""Processes one body: makes its prompts, runs its requests, and sends their results."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from ...requests.names import checked_name
from ...requests.sampling import SamplingParams
from ...requests.structured import StructuredOutputsParams
from ...shared.errors import EnginewrightError, OverloadError, RequestError
from ...tasks import arguments
from ...tasks.context import GENERATE
from ...tasks.generate import Generate
from ...text.fill_in_middle import Gap
from ..engines.engine_client import Model, ReplacedError, Running
from ..engines.records import Ended, Piece
from ..http.errors import NO_INFILL, ApiError
from ..http.front import Front
from ..http.tenants import Charge
from .answers import Given, Shape, usage
from .bodies import Body, ChatBody, CompletionBody, InfillBody, held_form
from .conversations import chat_prompt, effort_variables, remember, template_reads, tokenizer_of
from .reading import Reader, Reading
from .tools import ToolChoice, tool_choice
from .work import BodyJob, Work


@dataclass(frozen=True)
class Order:
    """The request of a body, in OpenAI's format. Bodies of other protocols are converted to it.

    Attributes:
        body: the prompts and parameters.
        kind: makes the object that formats the answer.
        ignored: names of fields that don't change the answer.
        notes: further headers of the answer.
    """

    body: Body
    kind: Callable[..., Shape]
    ignored: Sequence[str] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


class Job(BodyJob):
    """The work for one body that asks for text: its prompts and parameters, then its running requests.

    Args:
        front, charge, model, request: as for `BodyJob`.
        order: makes the `Order` for the model. It runs on a thread, like all work that grows with a body.
    """

    body: Body
    params: SamplingParams
    shape: Shape

    def __init__(
        self, front: Front, charge: Charge, model: Model, request: Request, order: Callable[[Model], Order]
    ) -> None:
        super().__init__(front, charge, model, request)
        self._order = order
        self._checked = False
        self.answers = 1
        self.tools = ToolChoice()
        self.given: list[Given] = []
        self.spliced: int | None = None
        self.splices = False

    def _check(self) -> None:
        """Makes the order and its parameters. Raises RequestError naming the field."""
        order = self._order(self.model)
        self.body, self._kind, self.notes = order.body, order.kind, order.notes
        body, self._ignored = order.body, order.ignored
        self._sampling = body.sampling(self.model.model)
        self.answers = self._sampling.n
        if body.streamed and (self._sampling.num_beams > 1 or self._sampling.best_of is not None):
            name = "num_beams" if self._sampling.num_beams > 1 else "best_of"
            raise RequestError(f"{name}: which answers are given is known at their end", hint="Leave stream out.")
        self._form, self._unenforced = held_form(self._sampling.structured_outputs)
        if isinstance(body, ChatBody):
            self.tools = tool_choice(body.tools, body.tool_choice, body.parallel_tool_calls)
            self.splices = body.splice and self.front.options.splice
        self._checked = True

    @property
    def requests(self) -> int:
        """Returns the number of the job's requests: its prompts times the answers to each."""
        return len(self.given) * self.answers

    async def prepare(self) -> None:
        """Makes the prompts. It is called again if the model's bundle was replaced in the meantime."""
        await self.front.in_thread(self.tenant.name, self._prepare, self.charge.size)

    def _prepare(self) -> None:
        if not self._checked:
            self._check()
        body, front, model = self.body, self.front, self.model
        self.ignored, self.params = [*self._ignored], self._sampling
        self._version = model.hash
        if self._form is not None:
            self._hold(self._form)
        self.ignored += self._unenforced
        scope = self.tenant.name + (f"\0{body.cache_salt}" if body.cache_salt else "")
        self.scope = checked_name("cache_salt", scope)
        (self._chat if isinstance(body, ChatBody) else self._texts)()
        self.shape = self._kind(
            body,
            front.name(body.model, model),
            model.tokenizer,
            front.fingerprint(model),
            self.params.seed,
            self.tools,
            self.spliced,
        )

    def _hold(self, form: Mapping[str, Any]) -> None:
        """Makes ``form`` the form of the answer. Raises RequestError for an invalid one."""
        self.params = self.params.updated(structured_outputs=StructuredOutputsParams.checked(form))

    def _chat(self) -> None:
        """Makes a conversation's prompt, and the object that parses its answers."""
        body, model = self.body, self.model
        assert isinstance(body, ChatBody)
        prompt, self.spliced = chat_prompt(self.front, model, body, self.tools, self.scope, self.splices)
        self.given = [prompt]
        effort = body.effort()
        raw, reasons = not self._sampling.skip_special_tokens, effort is None or effort[1] != "none"
        self._reading = Reading(model.tokenizer, self.tools, prompt.ids, raw=raw, reasons=reasons)
        form = self.params.structured_outputs
        plain = form.to_plain() if isinstance(form, StructuredOutputsParams) else None
        held = self._reading.form(plain, self._budget(body, len(prompt.ids)))
        self.ignored += sorted(self._reading.ignored.difference(self.ignored))
        if held is not None and held is not plain:
            self._hold(held)
        self.ignored += body.ignored_parts()
        if effort is not None and model.tokenizer is not None:
            reads = template_reads(model.tokenizer, self.tools)
            self.ignored += [] if effort_variables(effort[1], reads) else [effort[0]]

    def _budget(self, body: ChatBody, prompt: int) -> int | None:
        """Returns the limit of reasoning tokens; None for no limit, or for one above the limit of the whole answer.

        ``prompt``: the number of prompt tokens. Raises RequestError if the model's reasoning can't be limited.
        """
        budget = body.reasoning_budget()
        if budget is None:
            return None
        name, tokens = budget
        if not self._reading.limits_reasoning:
            if self._reading.reasons and name == "thinking_token_budget":
                hint = "Leave it out, and limit the whole answer."
                raise RequestError(f"{name}: this model's reasoning doesn't end with a token of its own", hint=hint)
            self.ignored.append(name)
            return None
        room = self.model.model.context_length - prompt
        most = self.params.max_tokens
        return tokens if tokens < (room if most is None else min(room, most)) else None

    def _texts(self) -> None:
        assert isinstance(self.body, CompletionBody)
        self.given, ends = _prompts(self.model, self.body)
        if ends:
            self.params = self.params.updated(stop_token_ids=(*self.params.stop_token_ids, *ends))
        self._reading = Reading(None, self.tools, ())

    def reader(self) -> Reader:
        """Returns a reader of one answer."""
        return self._reading.reader(self._sampling, self.shape.call_prefix)

    def submit(self) -> list[Running]:
        """Starts the requests. Raises the errors of ``Model.submit``, and OverloadError if too many wait."""
        model, body = self.model, self.body
        if self._cancelled is not None:
            raise self._cancelled
        most = model.slots + self.front.options.max_waiting
        if model.running + len(self.given) > most:
            raise OverloadError(f"{model.running} requests run or wait already", retry_after=2.0)
        options = self.tenant.ranked(body.request_options(self.scope))
        self.charge.tokens = sum(len(prompt.ids) for prompt in self.given)  # also of a client that leaves
        submitted: list[Running] = []
        try:
            for prompt in self.given:
                task = Generate(prompt.ids, self.params)
                submitted.append(model.run(task, options, whole=not body.streamed, version=self._version))
        except EnginewrightError:
            for running in submitted:
                model.abort(running.number)
            raise
        self._running = submitted
        return submitted

    @property
    def streamed(self) -> bool:
        """Returns True if the client asks for a stream."""
        return self.body.streamed

    def span_fields(self) -> tuple[str, dict[str, Any]]:
        """Returns the name of the operation, and the attributes of its span."""
        operation = "chat" if isinstance(self.body, ChatBody) else "text_completion"
        names = ("max_tokens", "temperature", "top_p")
        params = {f"gen_ai.request.{name}": value for name in names if (value := getattr(self.params, name))}
        return operation, {**params, "gen_ai.response.id": self.shape.id}

    def _end(self, given: Given, ended: Ended, new: int) -> None:
        self.ended(len(given.ids), new, ended.metrics, [answer.finish_reason for answer in ended.result.answers])

    async def _remember(self, given: Given, text: str, ids: Sequence[int], reader: Reader) -> None:
        """Caches a finished turn, so that the conversation that continues it reuses its tokens.

        Args:
            given: the prompt.
            text: text of the answer, as the client gets it.
            ids: tokens of the answer.
            reader: the reader that has read the answer.
        """
        keep = partial(remember, self.front, self.model, self.scope, given, text, ids)
        turn = reader.turn
        if turn is None and reader.parses:  # it is cut off, and doesn't come back as it was
            return
        if turn is None or (turn.keys() == {"role", "content"} and turn["content"] == text):
            keep()
        elif ids and ids[-1] in self.model.model.eos_token_ids:
            assert isinstance(self.body, ChatBody)
            await self.front.in_thread(self.tenant.name, partial(keep, turn=(self.body, self.tools, turn)))

    async def whole(self) -> dict[str, Any]:
        """Returns the whole answer."""
        while True:
            try:
                return await self._whole()
            except ReplacedError:
                await self.prepare()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the answer's events; the events of one step are yielded together."""
        begun = False
        while True:
            try:
                async with contextlib.aclosing(self._stream()) as events:
                    async for data in events:
                        begun = True
                        yield data
                return
            except ReplacedError:
                if begun:  # another prompt of the body is being answered already
                    raise
                await self.prepare()

    async def _whole(self) -> dict[str, Any]:
        running = self.submit()
        waiting = [asyncio.ensure_future(one.result()) for one in running]
        try:
            results = await asyncio.gather(*waiting)
        except BaseException as e:
            for one, task in zip(running, waiting, strict=True):
                self.model.abort(one.number)
                task.cancel()  # where one fails, the others would wait for ever
            await asyncio.gather(*waiting, return_exceptions=True)
            if not isinstance(e, ReplacedError):
                self.aborted(sum(len(prompt.ids) for prompt in self.given), 0, e)
            raise
        new = reasoning = 0
        for i, (prompt, ended) in enumerate(zip(self.given, results, strict=True)):
            tokens = sum(len(one.token_ids) for one in ended.result.answers)
            self._end(prompt, ended, tokens)
            new += tokens
            for j, answer in enumerate(ended.result.answers):
                reader = self.reader()
                news = reader.read(answer)
                reasoning += reader.reasoning_tokens
                self.shape.add(i * self.answers + j, news, answer, ended, prompt)
                if self.splices:
                    await self._remember(prompt, answer.text, answer.token_ids, reader)
        self.charge.tokens = sum(len(prompt.ids) for prompt in self.given) + new
        counts = usage(sum(len(prompt.ids) for prompt in self.given), new, results, reasoning)
        if isinstance(self.body, CompletionBody) and self.body.scores_alone:
            counts = usage(counts["prompt_tokens"], 0, results)
        response = self.shape.response(counts)
        if self.body.prompt_logprobs is not None and results[0].result.prompt_logprobs is not None:
            response["prompt_logprobs"] = self.shape.prompt_logprobs(results[0])
        if self.body.return_token_ids:
            response["prompt_token_ids"] = self.given[0].ids
        return response

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        shape, prompt = self.shape, sum(len(one.ids) for one in self.given)
        running = self.submit()
        sent = _Sent()
        try:
            start = shape.start(prompt)
            async with contextlib.aclosing(_merged(running)) as events:
                async for i, event in events:
                    if isinstance(event, Ended):
                        await self._end_request(i, event, sent)
                    else:
                        data, start = start + self._news(i, event, sent, prompt), b""
                        yield data
            reasoning = sum(answer.reader.reasoning_tokens for answer in sent.answers.values())
            ends = [*sent.ends.values()]
            yield start + shape.end(usage(prompt, sent.tokens, ends, reasoning), ends)
        finally:
            self.charge.tokens = prompt + sent.tokens
            if len(sent.ends) < len(running):
                self._cut_off(running, sent)

    def _news(self, i: int, pieces: Sequence[Piece], sent: _Sent, prompt: int) -> bytes:
        """Returns the events for new pieces of request number ``i``.

        ``prompt``: the number of tokens of all prompts of the body.
        """
        shape, out = self.shape, []
        for piece in pieces:
            index = i * self.answers + piece.index
            if index not in sent.answers:
                sent.answers[index] = _Begun(self.reader(), [], [])
                out.append(shape.first(index, self.given[i].text))
            answer = sent.answers[index]
            answer.texts.append(piece.text)
            answer.ids.extend(piece.token_ids)
            counts = usage(prompt, sent.tokens) if shape.usage_always else None
            out.append(shape.news(index, answer.reader.push(piece), counts))
        return b"".join(out)

    async def _end_request(self, i: int, ended: Ended, sent: _Sent) -> None:
        """Counts request ``i``, which has ended, and keeps its finished turns."""
        sent.ends[i] = ended
        answers = [answer for index, answer in sent.answers.items() if index // self.answers == i]
        self._end(self.given[i], ended, sum(len(answer.ids) for answer in answers))
        if self.splices:
            for answer in answers:
                await self._remember(self.given[i], "".join(answer.texts), answer.ids, answer.reader)

    def _cut_off(self, running: Sequence[Running], sent: _Sent) -> None:
        """Aborts the requests of a stream that ends early, and counts their tokens unless they will be run again."""
        if not isinstance(error := sys.exception(), ReplacedError):
            open_requests = [i for i in range(len(running)) if i not in sent.ends]
            new = sum(len(one.ids) for index, one in sent.answers.items() if index // self.answers in open_requests)
            self.aborted(sum(len(self.given[i].ids) for i in open_requests), new, error)
        for one in running:
            self.model.abort(one.number)


@dataclass(frozen=True)
class _Begun:
    """One answer of a stream: its reader, and its texts and token ids so far."""

    reader: Reader
    texts: list[str]
    ids: list[int]


@dataclass(frozen=True)
class _Sent:
    """The part of a stream that was sent so far.

    Attributes:
        answers: index of an answer -> its reader, texts and tokens.
        ends: index of a request -> how it ended.
    """

    answers: dict[int, _Begun] = field(default_factory=dict)
    ends: dict[int, Ended] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Returns the number of new tokens of all answers."""
        return sum(len(answer.ids) for answer in self.answers.values())


def _prompts(model: Model, body: CompletionBody) -> tuple[list[Given], tuple[int, ...]]:
    """Returns the prompts of a body, and further tokens that end their answers."""
    prompts = []
    most = model.model.context_length - 1
    if body.suffix or isinstance(body, InfillBody):
        return _gaps(model, body, most)
    for prompt in body.prompts():
        if isinstance(prompt, str):
            tokenizer = tokenizer_of(model)
            encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
            prompts.append(Given(prompt, arguments.encode_within(encode, prompt, most) if prompt else []))
        else:
            text = ""
            if body.echo and model.tokenizer is not None:
                text = model.tokenizer.decode([i for i in prompt if i >= 0], skip_special_tokens=False)
            prompts.append(Given(text, prompt))
        if not prompts[-1].ids:
            raise RequestError("prompt: it is empty", hint="Pass a text, or at least one token.")
    return prompts, ()


def _gaps(model: Model, body: CompletionBody, most: int) -> tuple[list[Given], tuple[int, ...]]:
    """Returns the prompts and end tokens of a body that asks for the text before a suffix.

    ``most``: the most prompts. Raises ApiError if the model can't fill in the middle.
    """
    tokenizer = tokenizer_of(model)
    if (tokens := tokenizer.fill_in_middle) is None:
        raise ApiError(
            400,
            "its tokenizer has no tokens for filling in the middle, as models for code have",
            param=None if isinstance(body, InfillBody) else "suffix",
            problem=NO_INFILL,
            values={"model": model.name},
        )
    files: list[tuple[str, str]] = []
    suffix, names = body.suffix or "", {"input_prefix": "prompt", "input_suffix": "suffix"}
    if isinstance(body, InfillBody):
        if body.suffix:
            raise RequestError("suffix: it is input_suffix here", hint="Leave it out.")
        files = [(one.filename, one.text) for one in body.input_extra]
        suffix, names = body.input_suffix, {}

    def encode(name: str, text: str) -> list[int]:
        return arguments.encode_within(tokenizer.encode_guarded, text, most, names.get(name, name)) if text else []

    prompts = []
    for prompt in body.prompts():
        if not isinstance(prompt, str):
            raise RequestError("prompt: token ids with a suffix", hint="Pass text.")
        prompts.append(Given(prompt, tokens.prompt(tokenizer, Gap(prompt, suffix, files), encode)))
    return prompts, tokens.ends


async def _merged(running: Sequence[Running]) -> AsyncGenerator[tuple[int, list[Piece] | Ended], None]:
    """Yields the events of several requests, each with the request's index. Raises the first error."""
    if len(running) == 1:
        async with contextlib.aclosing(running[0].events()) as events:
            async for update in events:
                yield 0, update
        return
    queue: asyncio.Queue[tuple[int, list[Piece] | Ended | EnginewrightError]] = asyncio.Queue()

    async def forward(i: int, one: Running) -> None:
        try:
            async with contextlib.aclosing(one.events()) as events:
                async for update in events:
                    queue.put_nowait((i, update))
        except EnginewrightError as e:
            queue.put_nowait((i, e))

    tasks = [asyncio.create_task(forward(i, one)) for i, one in enumerate(running)]
    left = len(running)
    try:
        while left:
            i, event = await queue.get()
            if isinstance(event, EnginewrightError):
                raise event
            left -= isinstance(event, Ended)
            yield i, event
    finally:
        for task in tasks:
            task.cancel()


async def answer(
    front: Front, request: Request, charge: Charge, name: str | None, order: Callable[[Model], Order]
) -> Work[Job]:
    """Returns the response to a body of any route that generates text.

    Args:
        charge: the body's use of the tenant's quotas, which is ended here.
        name: name of the model; None for the first.
        order: makes the order for the model, on a thread.
    """
    with charge:
        model = await front.ready(name, GENERATE)
        job = Job(front, charge, model, request, order)
        await job.prepare()
        charge.widen(job.requests - 1)
        charge.handed_on = True
    return Work(front, job)
