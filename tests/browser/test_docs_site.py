"""The documentation site: each page is accessible by axe-core's rules, and fits a phone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, ViewportSize

from tests.browser.conftest import PATIENCE_MS

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
)
PHONE = ViewportSize(width=360, height=780)
DESK = ViewportSize(width=1280, height=800)


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site as `make docs-site` builds it."""
    directory = tmp_path_factory.mktemp("docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)]
    subprocess.run(words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: object) -> None:  # noqa: A002 — its name in the base class
        pass


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_of_the_documentation_is_accessible_and_fits(
    scheme: Literal["light", "dark"], chromium: Browser, docs: str, subtests: pytest.Subtests
) -> None:
    """In light on a desk, in dark on a phone: two visits see both of both."""
    phone = scheme == "dark"
    context = await chromium.new_context(
        viewport=PHONE if phone else DESK, has_touch=phone, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on(
        "request",
        lambda request: None if request.url.startswith((docs, "data:", "blob:")) else wrong.append(request.url),
    )
    for name in PAGES:
        with subtests.test(page=name):
            await page.goto(docs + name)
            await _shown(page, scheme)
            results = await Axe().run(page, options={"resultTypes": ["violations"]})
            assert _grave(results.response) == []
            wider = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wider <= 0, f"the page is {wider} px wider than the window"
            assert wrong == [], "errors of scripts and loads, and what was asked of the net"
            wrong.clear()
    await context.close()


async def _shown(page: Page, scheme: str) -> None:
    """Wait until the theme's script has chosen the colours."""
    colours = "slate" if scheme == "dark" else "default"
    await page.locator(f'body[data-md-color-scheme="{colours}"]').wait_for(state="attached")


def _grave(answer: dict[str, list[dict[str, object]]]) -> list[str]:
    """Return what axe calls serious or critical, with the first place where it is."""
    return [
        f"{each['id']}: {each['help']}, {len(nodes)} times, first {nodes[0]['html']:.300}"
        for each in answer["violations"]
        if each["impact"] in ("serious", "critical") and isinstance(nodes := each["nodes"], list)
    ]
