"""The site's tasks: functions under Django's own decorator. Nothing here knows taskmesh."""

from __future__ import annotations

from django.tasks import task


@task(queue_name="mail", priority=10)
def greet(name: str) -> str:
    """Pretend to send mail."""
    return f"Dear {name},"


@task
async def count_words(text: str) -> dict[str, int]:
    """Count how often each word occurs."""
    words = text.lower().split()
    return {word: words.count(word) for word in words}
