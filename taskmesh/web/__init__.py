"""The dashboard and the REST API (extra `web`): a thin layer that asks the public API and shows.

In reading order: `app` (puts it together), `security` (who may come in, and what their browsers may do), `api` (what
`taskmesh.operations` can do, as routes), `openapi`, `pages`, `views`, `live_view`, `serve`.
"""

from taskmesh.model.distribution import check_extra

check_extra("web", ("starlette", "uvicorn", "jinja2"), "the dashboard")

from taskmesh.web.app import create_app  # noqa: E402  # after the check: without the extra it is a bare ImportError
from taskmesh.web.serve import serve  # noqa: E402  # after the check: without the extra it is a bare ImportError

__all__ = ["create_app", "serve"]
