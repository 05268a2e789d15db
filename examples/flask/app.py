"""A Flask application: it publishes without an event loop, and shows a page that waits for the result.

See README.md beside this file.
"""

from __future__ import annotations

import os
import uuid

from flask import Flask, abort, redirect, render_template_string, request, url_for
from werkzeug.wrappers import Response

from taskmesh import TaskMesh, TaskNotFound, TaskOption, current_blocking_task

app = Flask(__name__)
mesh = TaskMesh(os.environ.get("TASKMESH_URI"), database=os.environ.get("TASKMESH_DATABASE", "reports"))

PAGE = """
<!doctype html>
<title>Report</title>
{% if not task.status.finished %}<meta http-equiv="refresh" content="1">{% endif %}
<h1>{{ task.status.value }}</h1>
{% if task.successes %}<p>{{ task.successes[0].returns }} primes</p>{% endif %}
{% if task.task_state.progress %}<progress value="{{ task.task_state.progress.fraction }}"></progress>{% endif %}
{% for reason in task.fail_reasons %}<p>{{ reason }}</p>{% endfor %}
"""


@mesh.task(run="process", option=TaskOption(run_timeout_ms=60_000, max_unexpected_retries=0))
def count_primes(below: int) -> int:
    """Count them, in a process of its own: it computes."""
    found = 0
    for number in range(2, below):
        found += all(number % divisor for divisor in range(2, int(number**0.5) + 1))
        if number % 1_000 == 0:
            current_blocking_task().progress(number / below)
    return found


@app.get("/")
def form() -> str:
    """Ask for a number."""
    return '<form method="post"><input name="below" type="number" value="10000"><button>Count primes</button></form>'


@app.post("/")
def publish() -> Response:
    """Publish, and lead to the page of the result."""
    key = uuid.uuid4().hex
    count_primes.publish_sync(key, below=request.form.get("below", 10_000, type=int))
    return redirect(url_for("result", key=key), 303)


@app.get("/results/<key>")
def result(key: str) -> str:
    """Show how far it is; the page comes again each second until there is a result."""
    try:
        task = mesh.get_sync("count_primes", key)
    except TaskNotFound:
        abort(404)
    return render_template_string(PAGE, task=task)
