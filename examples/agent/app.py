"""A research assistant that survives crashes and waits for people: each call of its model and of its tools is made once.

See README.md beside this file.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults, Tool, ToolDenied
from pydantic_ai.models import Model
from pydantic_ai.models.function import FunctionModel

from examples.agent import offline
from taskmesh import TaskMesh, current_task
from taskmesh.integrations.pydantic_ai import TaskmeshDurability

mesh = TaskMesh()
reports = Path("reports")

LIBRARY = {
    "ants at work": "Ants carry fifty times their weight.",
    "ants at rest": "Ants nap about two hundred and fifty times a day.",
}
WEEK_MS = 7 * 86_400_000


# --- what the agent can do ---


async def search(words: str) -> str:
    """Look something up."""
    return LIBRARY.get(words, "Nothing found.")


def publish(title: str, text: str) -> str:
    """Publish a report. Should it be called twice, because a worker died before it was recorded, it is the same file."""
    reports.mkdir(exist_ok=True)
    (reports / f"{title.lower()}.md").write_text(f"# {title}\n\n{text}\n")
    return f"{title} is published"


def researcher(model: Model | str) -> Agent[None, str | DeferredToolRequests]:
    """Return the agent. Its name and those of its tools are the names of the steps: keep them."""
    return Agent(
        model,
        name="researcher",
        instructions="Search before you write. Publish one short report, then say that it is done.",
        tools=[search, Tool(publish, requires_approval=True)],
        output_type=[str, DeferredToolRequests],
        capabilities=[TaskmeshDurability()],
    )


agent = researcher(os.environ.get("AGENT_MODEL") or FunctionModel(offline.answer))


# --- the task ---


@mesh.task
async def research(topic: str) -> str:
    """Let the agent work; what needs approval waits for a person, for a week, and holds no worker meanwhile."""
    result = await agent.run(f"Write a report about {topic}.")
    while isinstance(result.output, DeferredToolRequests):
        verdict = await current_task().wait_for("verdict", timeout_ms=WEEK_MS)
        if verdict is None:
            return "Nobody decided within a week."
        decision = True if verdict.get("approved") else ToolDenied(verdict.get("reason", "not approved"))
        decisions = DeferredToolResults(approvals={call.tool_call_id: decision for call in result.output.approvals})
        result = await agent.run(message_history=result.all_messages(), deferred_tool_results=decisions)
    return result.output
