"""What chat, responses and messages have in common: one conversation in, answers out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from sparseengine.async_llm import Arrived, Stream
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.messages import Delta
from sparseengine.errors import RequestError
from sparseengine.server.errors import ApiError, as_api_error, not_finished
from sparseengine.server.output import Event, MessageChoice, OutputFormat
from sparseengine.server.schemas import SparseFields
from sparseengine.server.service import Service, record_of
from sparseengine.server.tools import parser_for
from sparseengine.server.tools.choice import ToolPlan, plan_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A conversation request in one form. `sampling` holds SamplingParams' names; max_tokens=None
    means as many as fit."""

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    sparse: SparseFields | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    stream: bool = False
    cache_salt: str | None = None


class Conversation:
    """A checked request. Use `prepare`, then `run` once."""

    def __init__(self, service: Service, request: Request) -> None:
        self.service = service
        self.request = request
        self.record = record_of(request)
        self.prompt_ids: list[int] = []
        self.choices: list[MessageChoice] = []

    async def prepare(self, asked: Asked) -> None:
        """Every check that needs no engine. Raises `ApiError`."""
        service = self.service
        try:
            plan = self._plan_tools(asked)
        except RequestError as error:
            raise as_api_error(error, "tool_choice") from None
        fields = dict(asked.sampling)
        if plan.structured is not None:
            if fields.get("structured_outputs") is not None:
                raise ApiError(
                    400,
                    "tool_choice required or named cannot be combined with another constraint",
                    param="tool_choice",
                )
            fields["structured_outputs"] = plan.structured
        if plan.parser is not None and plan.parser.needs_special_tokens:
            fields["skip_special_tokens"] = False
        self.sparse: SparseParams | None = service.sparse(asked.sparse)
        given_length = fields.get("max_tokens")
        self.sampling: SamplingParams = service.sampling(fields, as_many_as_fit=True)
        self.cache_salt = asked.cache_salt
        service.check_room(self.sampling.n)
        text, self.prompt_ids = await self._encode(asked, plan)
        service.check_length(len(self.prompt_ids), given_length)
        self.format = OutputFormat(
            reasoning=service.settings.reasoning_parser,
            prompt=text,
            parser=plan.parser,
            tools=plan.tools,
            stream=bool(asked.stream),
        )
        self.choices = [
            MessageChoice(index=i, reader=self.format.reader()) for i in range(self.sampling.n)
        ]

    def _plan_tools(self, asked: Asked) -> ToolPlan:
        name = self.service.settings.tool_call_parser
        parser = None if name is None else parser_for(name)
        return plan_tools(
            asked.tool_choice, asked.tools, parser, parallel=asked.parallel_tool_calls
        )

    async def _encode(self, asked: Asked, plan: ToolPlan) -> tuple[str, list[int]]:
        try:
            return await self.service.encode_chat(
                asked.messages,
                tools=list(plan.tools) or None,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                template_kwargs=asked.template_kwargs,
            )
        except RequestError as error:
            raise as_api_error(error, "messages") from None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Stream]:
        async with self.service.running(
            self.record, [self.prompt_ids], self.sampling, self.sparse, self.cache_salt
        ) as stream:
            yield stream

    def take(self, arrived: Arrived) -> tuple[MessageChoice, Delta, list[Event]]:
        """Book a delta: the choice it belongs to and what is new in it to show."""
        self.record.note(arrived)
        delta = arrived.delta
        choice = self.choices[delta.choice]
        if delta.finish_reason == "error":
            raise not_finished(delta.stop_reason)
        events = choice.reader.push(delta.text)
        choice.token_ids += delta.token_ids
        if delta.sparse is not None:
            choice.sparse = delta.sparse.added_to(choice.sparse)
        if delta.finish_reason is not None:
            events += choice.reader.finish()
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choice, delta, events

    async def finish(self) -> None:
        """Run to the end, for answers that are not streamed."""
        async with self.run() as stream:
            while news := await stream.next():
                for arrived in news:
                    self.take(arrived)
