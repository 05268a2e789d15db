"""The site's pages: one enqueues, one shows the result."""

from __future__ import annotations

from django.http import Http404, HttpRequest, JsonResponse
from django.tasks import default_task_backend
from django.tasks.exceptions import TaskResultDoesNotExist
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from examples.django.tasks import count_words, greet


@csrf_exempt
async def count(request: HttpRequest) -> JsonResponse:
    """Take a text; its words are counted by a worker. In an async view, the async form."""
    result = await count_words.aenqueue(request.body.decode())
    return JsonResponse({"result": f"/results/{result.id}"}, status=202)


@csrf_exempt
def sign_up(request: HttpRequest) -> JsonResponse:
    """Greet somebody new by mail."""
    result = greet.enqueue(name=request.POST["name"])
    return JsonResponse({"result": f"/results/{result.id}"}, status=202)


def result(_: HttpRequest, result_id: str) -> JsonResponse:
    """Show what has become of it."""
    try:
        found = default_task_backend.get_result(result_id)
    except TaskResultDoesNotExist:
        raise Http404(result_id) from None
    value = found.return_value if found.status == "SUCCESSFUL" else None
    return JsonResponse({"status": found.status, "value": value, "errors": [error.traceback for error in found.errors]})


urlpatterns = [
    path("texts", count),
    path("people", sign_up),
    path("results/<str:result_id>", result),
]
