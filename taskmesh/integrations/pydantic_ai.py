"""Agents of pydantic-ai that survive crashes (extra `pydantic-ai`): each model call and each tool call is a step of the task.

    from pydantic_ai import Agent
    from taskmesh.integrations.pydantic_ai import TaskmeshDurability

    agent = Agent("openai:gpt-5", name="researcher", tools=[search], capabilities=[TaskmeshDurability()])

    @mesh.task
    async def research(question: str) -> str:
        return (await agent.run(question)).output

If the worker dies, the next one runs the agent again from its first line: what models and tools had answered comes from the
task's records, and the agent goes on with the first call that has none. Outside of a task the agent is one like any other.

It implements what pydantic-ai offers to engines (`pydantic_ai.durable_exec`). A process that dies between a call and its record
makes the call again, as with any step.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

from taskmesh.consumer.run.context import BlockingTaskContext, TaskContext, current_task, running_task
from taskmesh.consumer.run.recording import step_under_way
from taskmesh.mesh import TaskMesh
from taskmesh.model.distribution import check_extra
from taskmesh.model.errors import InvalidKey, InvalidName, TaskFailed, TaskMeshError, TaskTooLarge, UnstorableValue
from taskmesh.model.ids import checked_step_name
from taskmesh.model.task import task_id

check_extra("pydantic-ai", ("pydantic_ai",), "an agent in a task")

# ruff: noqa: E402 — after the check: without the extra it is a bare ImportError
from pydantic import JsonValue
from pydantic_ai import ModelMessagesTypeAdapter, RunContext
from pydantic_ai.agent import EventStreamHandler
from pydantic_ai.capabilities.abstract import WrapRunHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    DurabilityEngineSpec,
    DurableOperationId,
    ExternalEventError,
    ExternalEventWaiter,
    JournalCallableOperationBackend,
    ModelRequestId,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    ToolsetValidateToolArgumentsId,
    conversation_id_from_run_id,
    external_event_scope,
    record_durable_unit,
    replay_scope,
)
from pydantic_ai.exceptions import UserError
from pydantic_ai.models import Model
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import AgentDepsT

__all__ = ["TaskmeshDurability", "refuse", "resolve"]

_Config = Mapping[str, Any]
_LONGEST_NAME = 200
"""Longer names are cut, and end with a hash of the whole: a step's name has at most 256 characters."""
_ASKED = ("part_kind", "tool_name", "content", "args")
"""What of a message's part is asked or answered. Ids and times differ from run to run, unless they come from a record."""


class TaskmeshDurability(BaseDurabilityCapability[AgentDepsT]):
    """The capability that makes an agent's runs in a handler durable. Give it to `Agent(…, capabilities=[…])`.

    The agent needs a `name`, and each toolset beside its own tools an `id`: they are part of the steps' names, so keep them.
    A tool with `metadata={"taskmesh": False}` is no step: it runs again at each resumption, and may itself use
    `current_task().step`, `wait_for`, `sleep` or `start`.

    `models`: models by their ids, for runs with another model than the agent's. `event_stream_handler`: gets the events of a run;
    those of a recorded call not again. `name`: instead of the agent's. `parallel_tools`: whether tools that the model asks for
    at once run at once.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="taskmesh",
        durable_unit_noun="step",
        durable_container_noun="task",
        codec=JSON_CODEC,
        serialization_failure=lambda error: UnstorableValue(f"the answer cannot be recorded as JSON: {error}"),
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        tool_config_key="taskmesh",
    )

    def __init__(
        self,
        *,
        models: Mapping[str, Model] | None = None,
        event_stream_handler: EventStreamHandler[AgentDepsT] | None = None,
        name: str | None = None,
        parallel_tools: bool = True,
    ) -> None:
        super().__init__(models=models, event_stream_handler=event_stream_handler, name=name)
        self._mode: Literal["parallel_ordered_events", "sequential"] = (
            "parallel_ordered_events" if parallel_tools else "sequential"
        )

    @property
    def in_durable_context(self) -> bool:
        """Whether this code is a handler's own, and not that of a step. Raises `TaskMeshError` in a plain handler."""
        task = running_task()
        if isinstance(task, BlockingTaskContext) and step_under_way() is None:
            raise TaskMeshError(
                f"task {task.name!r} {task.key!r}: the agent {self.name!r} can record its calls in an async handler only: "
                "make it `async def` and await agent.run(…), or run the agent as a whole in a step"
            )
        return isinstance(task, TaskContext) and step_under_way() is None

    def get_durable_operation_backend(self) -> _Backend:
        """Return what turns the agent's calls into steps."""

        def of_tool(_: DurableOperationId, tool: Any, name: str) -> _Config | Literal[False]:
            config = self._build_resolve_tool_config({})(tool, name)
            if config:
                raise UserError(
                    f"tool {name!r}: its metadata 'taskmesh' may be False (no step) and nothing else, got {dict(config)!r}"
                )
            return config

        config = RoleBasedOperationConfig[_Config](model={}, event={}, capability={}, tool={}, resolve_tool=of_tool)
        return _Backend(agent_name=self.name, default_model_id=self.default_model_id, config=config)

    def get_default_run_id(self) -> str | None:
        """Return the id of a run that was given none: the same at every resumption."""
        return _numbered_run(current_task()) if self.in_durable_context else None

    def get_default_conversation_id(self, run_id: str) -> str | None:
        """Return the id of a conversation that was given none: the same at every resumption."""
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        """Return when a run with a `timeout` began first: recorded, so that a resumption does not restart the clock."""
        if not self.in_durable_context:
            return None
        return await current_task().step(_step_name(f"{self.name}__run_start_time", run_id), _now)

    async def wrap_run(self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        """Run the agent: what it waits for puts the task aside, and what comes from records is not traced again."""
        if not self.in_durable_context or self.agent is None:
            return await super().wrap_run(ctx, handler=handler)
        waiter = _Waiter(self.name, ctx.run_id or "")
        with self.agent.parallel_tool_call_execution_mode(self._mode), external_event_scope(waiter), replay_scope():
            return await super().wrap_run(ctx, handler=handler)


class _Backend(JournalCallableOperationBackend[_Config]):
    """Each of an agent's calls, as a step."""

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: _Config,  # noqa: ARG002 — the base class's; there is nothing to configure
    ) -> object:
        """Make the call, or return its record. Raises `StepMismatch` if the record is another call's."""
        ctx = next((part for part in cache_key if isinstance(part, RunContext)), None)
        run_id, call_id = (ctx.run_id, ctx.tool_call_id) if ctx is not None else (None, None)
        ran = False

        async def call(*_: object) -> object:
            nonlocal ran
            ran = True
            return await body()

        # What a mismatch names.
        call.__qualname__ = name
        try:
            value = await current_task().step(_step_name(name, run_id, call_id), call, *_asked(operation_id, cache_key))
        except TaskTooLarge as error:
            raise TaskFailed(str(error)) from error  # the call would be made, and paid for, again at each retry
        record_durable_unit(executed=ran)
        return value


def _asked(operation_id: DurableOperationId, cache_key: tuple[object, ...]) -> tuple[object, ...]:
    """Return what a call asks for, which has to be the same when it is resumed: the fingerprint is made of it.

    Of a tool call its arguments; of a model call what is new in the conversation. What the model is told besides
    (instructions, settings, tools) may change under a run: what it has answered stands.
    """
    if isinstance(operation_id, ToolsetCallToolId | ToolsetValidateToolArgumentsId):
        return cache_key[:2]
    if isinstance(operation_id, ModelRequestId):
        messages: Any = cache_key[1]
        newest = ModelMessagesTypeAdapter.dump_python(
            messages[-1:], mode="json", fallback=lambda part: repr(type(part))
        )
        parts = [part for message in newest for part in message["parts"] if part["part_kind"] != "system-prompt"]
        return (len(messages), [{field: part.get(field) for field in _ASKED} for part in parts])
    return ()


def _step_name(name: str, run_id: str | None, call_id: str | None = None) -> str:
    """Return the name of a step: calls of one tool side by side have names of their own, and so have runs with given ids."""
    if call_id is not None:
        name = f"{name}:{call_id}"
    if run_id is not None and not _is_numbered(run_id):
        name = f"{name}@{run_id}"
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}…{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


async def _now() -> datetime:
    return datetime.now(UTC)


# --- the runs of one execution ---

_runs: WeakKeyDictionary[TaskContext, Counter[str]] = WeakKeyDictionary()
"""How many runs of agents an execution has begun, and how often each has asked for something from outside."""


def _numbered_run(task: TaskContext) -> str:
    counts = _runs.setdefault(task, Counter())
    counts[""] += 1
    return f"{_numbered_prefix(task)}{counts['']}"


def _is_numbered(run_id: str) -> bool:
    return run_id.startswith(_numbered_prefix(current_task()))


def _numbered_prefix(task: TaskContext) -> str:
    return f"{task.name}:{task.key}:run-"


# --- what a run waits for from outside ---


class _Waiter(ExternalEventWaiter):
    """Puts the task aside until somebody answers: `RequestInput` of pydantic-ai, and whatever else asks outside."""

    def __init__(self, agent_name: str, run_id: str) -> None:
        self._agent_name = agent_name
        self._run_id = run_id

    async def wait(
        self, name: str, *, ask: Callable[[str], Awaitable[JsonValue]], timeout: timedelta | None
    ) -> JsonValue:
        task = current_task()
        run = self._run_id.removeprefix(_numbered_prefix(task)) if _is_numbered(self._run_id) else self._run_id
        counts = _runs.setdefault(task, Counter())
        waited = f"{name}@{run}"
        counts[waited] += 1
        event = _step_name(f"{self._agent_name}__external_event.{name}@{run}.{counts[waited]}", None)
        token = json.dumps([task.name, task.key, event])

        async def asked(token: str) -> JsonValue:
            return await ask(token)

        if (answer := await task.step(f"{event}.ask", asked, token)) is not None:
            return answer
        timeout_ms = None if timeout is None else round(timeout / timedelta(milliseconds=1))
        signal: dict[str, Any] | None = await task.wait_for(event, timeout_ms=timeout_ms)
        if signal is None:
            raise ExternalEventError(f"no answer came within {timeout}")
        if "refused" in signal:
            raise ExternalEventError(signal["refused"])
        answered: JsonValue = signal.get("answer")
        return answered


async def resolve(mesh: TaskMesh, token: str, answer: JsonValue) -> None:
    """Answer what an agent's run waits for, by the token that it handed out: the run goes on, wherever there is a worker.

    The first answer counts; a further one changes nothing. A token names the task and is no secret: who may answer is for you to
    check. Raises `TaskNotFound`, `TaskFinished`, `ValueError` for a token that is none.
    """
    await _signal(mesh, token, {"answer": answer})


async def refuse(mesh: TaskMesh, token: str, reason: str) -> None:
    """End a run's wait without an answer, as its timeout would. All else is as told at `resolve`."""
    await _signal(mesh, token, {"refused": reason})


async def _signal(mesh: TaskMesh, token: str, payload: dict[str, JsonValue]) -> None:
    try:
        name, key, event = json.loads(token)
        task_id(name, key)
        checked_step_name("the event", event)
    except (ValueError, TypeError, InvalidName, InvalidKey):
        raise ValueError(f"not a token that an agent's run handed out: {token!r:.200}") from None
    await mesh.signal(name, key, event, payload, signal_id=event)
