"""Agents of pydantic-ai in a task: each call of a model and of a tool is a step, made once whatever ends the execution."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic_ai import (
    Agent,
    AgentStreamEvent,
    DeferredToolRequests,
    DeferredToolResults,
    FunctionToolset,
    InstrumentationSettings,
    ModelMessage,
    ModelResponse,
    RunContext,
    TextPart,
    Tool,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.capabilities import Instrumentation, RequestInput
from pydantic_ai.models.function import AgentInfo, FunctionModel

from taskmesh import Status, StepMismatch, Task, TaskMesh, TaskOption, current_task
from taskmesh.integrations.pydantic_ai import TaskmeshDurability, refuse, resolve
from tests.durable.test_suspension import due_now, suspended
from tests.waiting import eventually
from tests.working import finished, working

AGAIN = TaskOption(unexpected_retry_delay_ms=0, max_unexpected_retries=20)


class Calls:
    """What was called. Each call ends the execution the first time, and comes to its own end the second."""

    def __init__(self, *, fragile: bool = True) -> None:
        self.ended: Counter[str] = Counter()
        self._fragile = fragile
        self._begun: set[str] = set()

    def begin(self, what: str) -> None:
        """It has been called once, as it were."""
        self._begun.add(what)

    def call(self, what: str) -> None:
        if self._fragile and what not in self._begun:
            self.begin(what)
            raise ConnectionError(f"cut off in {what}")
        self.ended[what] += 1


def answers(messages: list[ModelMessage]) -> dict[str, Any]:
    """Return what tools have answered so far, by their names and arguments."""
    parts = [part for message in messages for part in message.parts]
    asked = {part.tool_call_id: part.args_as_dict() for part in parts if isinstance(part, ToolCallPart)}
    return {
        f"{part.tool_name} {next(iter(asked[part.tool_call_id].values()))}": part.content
        for part in parts
        if isinstance(part, ToolReturnPart)
    }


def planner(calls: Calls) -> FunctionModel:
    """A model that searches for two things at once, then reads what it has found of one, then answers."""

    def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        known = answers(messages)
        calls.call(f"model {len(known)}")
        if not known:
            return ModelResponse(parts=[ToolCallPart("search", {"about": what}) for what in ("ants", "bees")])
        if len(known) == 2:
            return ModelResponse(parts=[ToolCallPart("read", {"page": known["search ants"]})])
        return ModelResponse(parts=[TextPart(", ".join(f"{asked}: {got}" for asked, got in sorted(known.items())))])

    return FunctionModel(answer, model_name="planner")


def researcher(calls: Calls, *capabilities: Any, **settings: Any) -> Agent[None, str]:
    """An agent with two tools, one async and one plain."""

    async def search(about: str) -> str:
        calls.call(f"search {about}")
        return f"{about}.html"

    def read(page: str) -> str:
        calls.call(f"read {page}")
        return page.upper()

    durability = TaskmeshDurability[None](**settings)
    return Agent(planner(calls), name="researcher", tools=[search, read], capabilities=[durability, *capabilities])


FOUND = "read ants.html: ANTS.HTML, search ants: ants.html, search bees: bees.html"
EACH_ONCE = {"model 0": 1, "search ants": 1, "search bees": 1, "model 2": 1, "read ants.html": 1, "model 3": 1}


def names(task: Task) -> list[str]:
    return [step.name for step in task.steps]


@pytest.mark.parametrize("parallel_tools", [True, False])
async def test_each_call_is_made_once_whatever_ends_executions_between_them(
    mesh: TaskMesh, parallel_tools: bool
) -> None:
    calls = Calls()
    agent = researcher(calls, parallel_tools=parallel_tools)
    run_ids: set[str] = set()

    @mesh.task(option=AGAIN)
    async def research(question: str) -> str:
        result = await agent.run(question)
        run_ids.add(result.run_id)
        return result.output

    handle = await research.publish("1", question="?")
    async with working(mesh, "w1"):
        assert await handle.result(60) == FOUND
    assert calls.ended == EACH_ONCE
    task = await handle.task()
    assert len(task.fail_reasons) in (5, 6), "two tools that are called at once may fail at once"
    assert names(task)[0] == "researcher__model.request"
    assert sum(":search:" in name for name in names(task)) == 2
    assert len(set(names(task))) == 6
    assert run_ids == {"research:1:run-1"}


async def test_a_call_that_is_not_the_recorded_one_is_a_mismatch_and_calls_nothing(mesh: TaskMesh) -> None:
    calls = Calls()
    agent = researcher(calls)
    questions = ["first", "second"]

    mismatches: list[str] = []

    @mesh.task(option=AGAIN)
    async def research() -> str:
        try:
            return (await agent.run(questions.pop(0) if len(questions) > 1 else questions[0])).output
        except StepMismatch as mismatch:
            mismatches.append(str(mismatch))
            raise

    handle = await research.publish("1")
    calls.begin("model 0")  # it is recorded; then a tool fails, and the handler comes again with another question
    async with working(mesh, "w1"):
        await eventually(lambda: mismatches, what="the task is put off")
    assert "the step 'researcher__model.request' was recorded of researcher__model.request(" in mismatches[0]
    assert calls.ended == {"model 0": 1}
    assert not (await handle.status()).finished


async def test_what_the_model_is_told_besides_may_change_under_a_run(mesh: TaskMesh) -> None:
    calls = Calls()
    agent = researcher(calls)
    told: list[int] = []

    @agent.instructions
    def today() -> str:
        told.append(1)
        return f"it is day {len(told)}"

    @mesh.task(option=AGAIN)
    async def research() -> str:
        return (await agent.run("?")).output

    async with working(mesh, "w1"):
        assert await (await research.publish("1")).result(60) == FOUND
    assert calls.ended == EACH_ONCE


# --- what people decide ---


def buyer(bought: list[str], ask: Any, timeout: timedelta | None = None) -> Agent[None, str]:
    """An agent that buys if a human approves."""

    def buy(what: str) -> str:
        bought.append(what)
        return f"bought {what}"

    def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        last = messages[-1].parts[-1]
        if isinstance(last, ToolReturnPart):
            return ModelResponse(parts=[TextPart(str(last.content))])
        return ModelResponse(parts=[ToolCallPart("buy", {"what": "tea"})])

    return Agent(
        FunctionModel(answer),
        name="buyer",
        tools=[Tool(buy, requires_approval=True)],
        capabilities=[TaskmeshDurability(), RequestInput(ask, timeout=timeout)],
    )


def with_approval(mesh: TaskMesh, timeout: timedelta | None = None) -> tuple[Any, list[str], list[tuple[str, str]]]:
    bought: list[str] = []
    asked: list[tuple[str, str]] = []

    async def ask(_: RunContext[None], requests: DeferredToolRequests, token: str) -> None:
        asked.append((token, requests.approvals[0].tool_call_id))

    agent = buyer(bought, ask, timeout)

    @mesh.task(option=AGAIN)
    async def shop() -> str:
        return (await agent.run("buy tea")).output

    return shop, bought, asked


async def test_a_run_that_waits_for_a_person_is_put_aside_and_the_first_answer_counts(mesh: TaskMesh) -> None:
    shop, bought, asked = with_approval(mesh)
    handle = await shop.publish("1")
    async with working(mesh, "w1") as worker:
        await suspended(mesh, "shop", "1")
        await eventually(lambda: not worker.running, what="it holds no slot")
        [(token, call_id)] = asked
        await resolve(mesh, token, {"approvals": {call_id: True}})
        await refuse(mesh, token, "too late")
        assert await handle.result(60) == "bought tea"
        await resolve(mesh, token, {"approvals": {call_id: True}})
    assert bought == ["tea"]
    assert len(asked) == 1, "nobody is asked twice"


async def test_a_refusal_and_a_timeout_are_answers_too(mesh: TaskMesh) -> None:
    shop, bought, asked = with_approval(mesh, timedelta(hours=1))
    refused, late = await shop.publish("refused"), await shop.publish("late")
    async with working(mesh, "w1"):
        await suspended(mesh, "shop", "late")
        await suspended(mesh, "shop", "refused")
        await refuse(mesh, next(token for token, _ in asked if "refused" in token), "no money")
        await due_now(mesh, "late")
        assert "no money" in await refused.result(60)
        assert "no answer came within 1:00:00" in await late.result(60)
    assert not bought


async def test_a_token_that_is_none_is_refused(mesh: TaskMesh) -> None:
    for token in ("tea", "[]", "[1, 2, 3]", '["shop", "", "event"]', '["shop", "key", 3]', "{}"):
        with pytest.raises(ValueError, match="not a token that an agent's run handed out: ") as error:
            await resolve(mesh, token, None)
        assert token in str(error.value)


async def test_a_tool_that_is_no_step_may_wait_and_take_steps_itself(mesh: TaskMesh) -> None:
    calls = Calls(fragile=False)

    async def search(about: str) -> Any:
        word = await current_task().wait_for(about)
        calls.call(about)
        return await current_task().step(f"look up {about}", str.upper, word)

    agent = Agent(
        planner(calls),
        name="researcher",
        tools=[Tool(search, metadata={"taskmesh": False}), Tool(lambda page: page * 2, name="read")],
        capabilities=[TaskmeshDurability()],
    )

    @mesh.task(option=AGAIN)
    async def research() -> str:
        return (await agent.run("?")).output

    handle = await research.publish("1")
    async with working(mesh, "w1"):
        await suspended(mesh, "research", "1")
        await handle.signal("bees", "b")
        await handle.signal("ants", "a")
        assert await handle.result(60) == "read A: AA, search ants: A, search bees: B"
    assert calls.ended["model 0"] == 1


# --- several runs, streams, limits ---


async def test_runs_side_by_side_need_ids_and_then_keep_their_records_apart(mesh: TaskMesh) -> None:
    calls = Calls(fragile=False)
    agent = researcher(calls)
    failed: list[str] = []
    mismatches: list[str] = []

    @mesh.task(option=AGAIN)
    async def both() -> list[str]:
        runs = [agent.run(f"question {n}", run_id=f"part-{n}") for n in range(2)]
        found = [result.output for result in await asyncio.gather(*runs)]
        if not failed:
            failed.append("once")
            raise RuntimeError("after all calls")
        return found

    @mesh.task(option=AGAIN)
    async def without() -> None:
        try:
            await asyncio.gather(agent.run("question 1"), agent.run("question 2"))
        except StepMismatch as mismatch:
            mismatches.append(str(mismatch))
            raise

    async with working(mesh, "w1"):
        handle = await both.publish("1")
        assert await handle.result(60) == [FOUND, FOUND]
        assert {name.rpartition("@")[2].partition("#")[0] for name in names(await handle.task())} == {
            "part-0",
            "part-1",
        }
        assert set(calls.ended.values()) == {2}
        await without.publish("1")
        await eventually(lambda: mismatches, what="the task is put off")
    assert "give each a name of its own" in mismatches[0]


async def test_events_reach_their_handler_once_and_a_stream_can_be_read(mesh: TaskMesh) -> None:
    calls = Calls(fragile=False)
    seen: list[str] = []
    failed: list[str] = []

    async def handler(_: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
        seen.extend([event.event_kind async for event in events])

    async def stream(_: list[ModelMessage], __: AgentInfo) -> AsyncIterator[str]:
        calls.call("stream")
        yield "so "
        yield "it is"

    agent = Agent(
        FunctionModel(stream_function=stream),
        name="speaker",
        capabilities=[TaskmeshDurability(event_stream_handler=handler)],
    )

    @mesh.task(option=AGAIN)
    async def speak() -> str:
        async with agent.run_stream("?") as result:
            said = [part async for part in result.stream_text(debounce_by=None)]
        if not failed:
            failed.append("once")
            raise RuntimeError("after the stream")
        return said[-1]

    async with working(mesh, "w1"):
        assert await (await speak.publish("1")).result(60) == "so it is"
    assert calls.ended == {"stream": 1}
    assert seen.count("part_start") == 1


async def test_an_answer_that_is_too_large_is_not_paid_for_again(mesh: TaskMesh) -> None:
    calls = Calls(fragile=False)

    def answer(_: list[ModelMessage], __: AgentInfo) -> ModelResponse:
        calls.call("model")
        return ModelResponse(parts=[TextPart("x" * 1_100_000)])

    agent = Agent(FunctionModel(answer), name="verbose", capabilities=[TaskmeshDurability()])

    @mesh.task(option=AGAIN)
    async def talk() -> str:
        return (await agent.run("?")).output

    await talk.publish("1")
    async with working(mesh, "w1"):
        task = await finished(mesh, "talk", "1")
    assert task.status is Status.FAIL
    assert "'verbose__model.request' has 1100" in task.fail_reasons[0]
    assert calls.ended == {"model": 1}


async def test_the_time_of_a_run_is_counted_from_its_first_beginning(mesh: TaskMesh) -> None:
    calls = Calls()
    agent = researcher(calls)
    deadlines: set[Any] = set()

    @agent.instructions
    def note(ctx: RunContext[None]) -> str:
        deadlines.add(ctx.deadline)
        return "?"

    @mesh.task(option=AGAIN)
    async def research() -> str:
        return (await agent.run("?", timeout=600)).output

    async with working(mesh, "w1"):
        handle = await research.publish("1")
        assert await handle.result(60) == FOUND
    assert len(deadlines) == 1
    assert names(await handle.task())[0] == "researcher__run_start_time"


async def test_what_comes_from_records_is_not_traced_again(mesh: TaskMesh) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    calls = Calls()
    agent = researcher(calls, Instrumentation(InstrumentationSettings(tracer_provider=provider)))

    @mesh.task(option=AGAIN)
    async def research() -> str:
        return (await agent.run("?")).output

    async with working(mesh, "w1"):
        await (await research.publish("1")).result(60)
    good = Counter(span.name for span in exporter.get_finished_spans() if span.status.is_ok or span.status.is_unset)
    assert good["chat planner"] == 3


# --- where it does not apply ---


async def test_outside_of_a_handler_and_within_a_step_an_agent_is_one_like_any_other(mesh: TaskMesh) -> None:
    agent = researcher(Calls(fragile=False))
    assert (await agent.run("?")).output == FOUND

    async def whole() -> str:
        return (await agent.run("?")).output

    @mesh.task
    async def research() -> str:
        return await current_task().step("research", whole)

    handle = await research.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == FOUND
    assert names(await handle.task()) == ["research"]


async def test_a_plain_handler_is_told_to_be_async(mesh: TaskMesh) -> None:
    agent = researcher(Calls(fragile=False))

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    def research() -> str:
        return asyncio.run(agent.run("?")).output

    await research.publish("1")
    async with working(mesh, "w1"):
        task = await finished(mesh, "research", "1")
    assert "the agent 'researcher' can record its calls in an async handler only" in task.fail_reasons[0]


async def test_toolsets_of_a_single_run_and_unknown_settings_of_tools_are_refused(mesh: TaskMesh) -> None:
    agent = researcher(Calls(fragile=False))

    def search(about: str) -> str:
        return about

    wrong = Agent(
        planner(Calls(fragile=False)),
        name="researcher",
        tools=[Tool(search, metadata={"taskmesh": {"retries": 3}})],
        capabilities=[TaskmeshDurability()],
    )

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def research(own: bool) -> str:
        return (await (agent.run("?", toolsets=[FunctionToolset([search])]) if own else wrong.run("?"))).output

    await research.publish_many({"toolset": {"own": True}, "setting": {"own": False}})
    async with working(mesh, "w1"):
        assert (
            "cannot be added at runtime with taskmesh" in (await finished(mesh, "research", "toolset")).fail_reasons[0]
        )
        assert (
            "may be False (no step) and nothing else" in (await finished(mesh, "research", "setting")).fail_reasons[0]
        )


async def test_a_person_asked_in_the_handler_decides_on_deferred_calls(mesh: TaskMesh) -> None:
    """The way without tokens: the run ends with requests, the handler waits, and another run goes on from there."""
    bought: list[str] = []

    def buy(what: str) -> str:
        bought.append(what)
        return f"bought {what}"

    def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        last = messages[-1].parts[-1]
        done = isinstance(last, ToolReturnPart)
        return ModelResponse(
            parts=[TextPart(str(last.content)) if done else ToolCallPart("buy", {"what": "tea"})]  # type: ignore[union-attr]  # `done` says so
        )

    agent = Agent(
        FunctionModel(answer),
        name="buyer",
        output_type=[str, DeferredToolRequests],
        tools=[Tool(buy, requires_approval=True)],
        capabilities=[TaskmeshDurability()],
    )

    @mesh.task(option=AGAIN)
    async def shop() -> str:
        result = await agent.run("buy tea")
        while isinstance(result.output, DeferredToolRequests):
            verdict = await current_task().wait_for("verdict")
            decided = DeferredToolResults(approvals={call.tool_call_id: verdict for call in result.output.approvals})
            result = await agent.run(message_history=result.all_messages(), deferred_tool_results=decided)
        return result.output

    handle = await shop.publish("1")
    async with working(mesh, "w1"):
        await suspended(mesh, "shop", "1")
        await handle.signal("verdict", True)
        assert await handle.result(60) == "bought tea"
    assert bought == ["tea"]
