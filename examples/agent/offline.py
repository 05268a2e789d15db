"""A model for trying things out, as pydantic-ai's `FunctionModel` wants it: no network, no key, always the same answers."""

from __future__ import annotations

from pydantic_ai import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo


def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
    """Search for two things at once, publish what was found, and report."""
    parts = [part for message in messages for part in message.parts]
    found = [part.content for part in parts if isinstance(part, ToolReturnPart)]
    if not found:
        return ModelResponse(
            parts=[ToolCallPart("search", {"words": words}) for words in ("ants at work", "ants at rest")]
        )
    if len(found) == 2:
        return ModelResponse(parts=[ToolCallPart("publish", {"title": "Ants", "text": "\n".join(map(str, found))})])
    return ModelResponse(parts=[TextPart(f"Done: {found[-1]}")])
