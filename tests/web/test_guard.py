"""T43: who may come in. Another origin's POST is refused; off loopback without a token it does not start."""

from __future__ import annotations

from http.cookiejar import CookieJar

import httpx
import pytest

from taskmesh import InvalidOption, TaskMesh
from taskmesh.operations.table import OPERATIONS
from taskmesh.web import create_app, serve
from taskmesh.web.security import LOOPBACK
from taskmesh.web.serve import is_loopback
from tests.web.conftest import ORIGIN, browser

TOKEN = "a-token-of-some-length"
CANCEL = "/api/v1/tasks/work/k/cancel"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", ""])
def test_t43_off_loopback_it_does_not_start_without_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKMESH_WEB_TOKEN", raising=False)
    with pytest.raises(InvalidOption, match="TASKMESH_WEB_TOKEN"):
        serve(TaskMesh("mongodb://nowhere"), host=host, port=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST"])
def test_loopback_is_known_by_any_of_its_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": ORIGIN}, 200),
        ({"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://ops.example", "Sec-Fetch-Site": "same-origin", "Host": "upstream:8080"}, 200),
        ({"Origin": ORIGIN, "Sec-Fetch-Site": "none"}, 200),
        ({"X-Taskmesh": "1"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:9999"}, 403),
        ({"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://evil.example", "X-Taskmesh": "1"}, 403),
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "none"}, 403),
        ({"Origin": ORIGIN, "Sec-Fetch-Site": "Same-Origin, cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "127.0.0.1:8080"}, 403),
        ({}, 403),
    ],
)
async def test_t43_another_origins_post_is_refused(mesh: TaskMesh, headers: dict[str, str], status: int) -> None:
    await mesh.publish("work", "k")
    async with browser(mesh) as client:
        del client.headers["Origin"]
        answer = await client.post(CANCEL, headers=headers)
        assert answer.status_code == status, answer.text
        form = await client.post("/do/task.delete", data={"name": "work", "key": "k"}, headers=headers)
        assert form.status_code == (303 if status == 200 else 403)
    assert await mesh.listing.count() == (0 if status == 200 else 1)


async def test_behind_a_proxy_that_hides_the_host_a_refusal_says_so(mesh: TaskMesh) -> None:
    """Over plain HTTP a browser does not say Sec-Fetch-Site."""
    async with browser(mesh, token=TOKEN) as client:
        answer = await client.post(
            "/login", data={"token": TOKEN}, headers={"Origin": "http://ops.example", "Host": "upstream:8080"}
        )
        assert answer.status_code == 403
        told = answer.json()["message"]
        assert "http://ops.example" in told
        assert "upstream:8080" in told
        assert "pass the Host header on" in told


async def test_a_name_that_was_made_to_lead_here_is_not_served_whatever_its_page_says(mesh: TaskMesh) -> None:
    """DNS rebinding: such a page is of the same origin, by the browser's own word."""
    await mesh.publish("work", "k")
    rebound = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    async with browser(mesh, hosts=LOOPBACK) as client:
        assert (await client.post(CANCEL, headers=rebound)).status_code == 400
    async with browser(mesh, token=TOKEN) as client:  # with a token: its cookie is not sent to another name
        assert (await client.post(CANCEL, headers=rebound)).status_code == 401
    assert (await mesh.get("work", "k")).status == "INIT"


async def test_without_a_token_only_loopback_names_are_served(mesh: TaskMesh) -> None:
    """Else a page elsewhere could let its own name resolve to 127.0.0.1, and be of the same origin."""
    async with browser(mesh, hosts=LOOPBACK) as client:
        for host, status in [
            ("127.0.0.1:8080", 200),
            ("localhost", 200),
            ("[::1]:8080", 200),
            ("evil.example", 400),
            ("127.0.0.1.evil.example:8080", 400),
            ("", 400),
            ("127.0.0.1:41800, evil", 400),
            ("127.0.0.1, evil.example:80", 400),
            ("127.0.0.1:evil.example", 400),
            ("localhost:80:80", 400),
            ("[::1], evil", 400),
            ("[::1]evil", 400),
            ("[::1]evil:80", 400),
            ("127.0.0.1:", 400),
            ("evil@127.0.0.1:80", 400),
            ("127.0.0.1 :80", 400),
        ]:
            assert (await client.get("/", headers={"Host": host})).status_code == status, host


async def test_a_token_is_asked_of_everybody(mesh: TaskMesh) -> None:
    async with browser(mesh, token=TOKEN) as client:
        for path in ("/", "/tasks", "/task?name=a&key=b", "/live", "/workers"):
            answer = await client.get(path)
            assert answer.status_code == 303, path
            assert answer.headers["location"].startswith("/login")
        for path in ("/api/v1/stats", "/api/v1/events", "/metrics", "/api/v1/openapi.json"):
            answer = await client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.post(CANCEL)).status_code == 401
        for scheme, status in ((f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), ("Bearer wrong", 401), (TOKEN, 401)):
            answer = await client.get("/api/v1/stats", headers={"Authorization": scheme})
            assert answer.status_code == status, scheme
        assert (await client.get("/livez")).text == "alive\n"
        assert (await client.get("/readyz")).text == "ready\n"


async def test_a_browser_shows_the_token_once(mesh: TaskMesh) -> None:
    async with browser(mesh, token=TOKEN) as client:
        wrong = await client.post("/login", data={"token": "wrong", "then": "/workers"})
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        right = await client.post("/login", data={"token": TOKEN, "then": "/workers"})
        assert (right.status_code, right.headers["location"]) == (303, "/workers")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie, "a link in a mail leads to the page, not to the login"
        assert TOKEN not in cookie
        assert (await client.get("/workers")).status_code == 200
        assert (await client.post(CANCEL, headers={"Origin": "https://evil.example"})).status_code == 403
        await client.post("/logout")
        assert (await client.get("/workers")).status_code == 303


async def test_login_leads_to_our_own_pages_only(mesh: TaskMesh) -> None:
    async with browser(mesh, token=TOKEN) as client:
        for then in (
            "https://evil.example",
            "//evil.example",
            "/\\evil.example",
            "javascript:alert(1)",
            "evil.example",
            "",
        ):
            answer = await client.post("/login", data={"token": TOKEN, "then": then})
            assert answer.headers["location"] == "/", then
        for then in (
            "/\t/evil.example",
            "/\r\nSet-Cookie: a=b",
            "/\x00",
        ):  # what a browser would leave out of an address
            answer = await client.post("/login", data={"token": TOKEN, "then": then})
            assert answer.headers["location"].startswith("/%"), then
            assert answer.headers.get_list("set-cookie") == [
                c for c in answer.headers.get_list("set-cookie") if "taskmesh" in c
            ]


async def test_a_login_from_elsewhere_is_refused(mesh: TaskMesh) -> None:
    """Else somebody could log a browser in under a token of his own."""
    async with browser(mesh, token=TOKEN) as client:
        answer = await client.post("/login", data={"token": TOKEN}, headers={"Origin": "https://evil.example"})
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


async def test_a_session_is_worth_nothing_under_another_token_or_with_a_byte_changed(mesh: TaskMesh) -> None:
    async with browser(mesh, token=TOKEN) as client:
        await client.post("/login", data={"token": TOKEN})
        [(cookie_name, session)] = [(name, value) for name, value in client.cookies.items() if name != "taskmesh_told"]
        assert (await client.get("/workers")).status_code == 200
        client.cookies.clear()
        for kept in (session[:-1], session + "0", session[::-1], "", TOKEN, '"', "\u00ff"):
            cookie = f"{cookie_name}={kept}".encode()
            assert (await client.get("/workers", headers={b"Cookie": cookie})).status_code == 303, kept
    async with browser(mesh, token=TOKEN + "!") as client:
        assert (await client.get("/workers", headers={"Cookie": f"{cookie_name}={session}"})).status_code == 303


async def test_dashboards_on_two_ports_of_one_host_do_not_log_each_other_out(mesh: TaskMesh) -> None:
    """A browser keeps one jar of cookies for all ports."""
    async with browser(mesh, token=TOKEN) as one, browser(mesh, token=TOKEN[::-1]) as other:
        jar = CookieJar()
        one.cookies, other.cookies = jar, jar
        await one.post("/login", data={"token": TOKEN})
        await other.post("/login", data={"token": TOKEN[::-1]})
        assert (await one.get("/workers")).status_code == 200
        assert (await other.get("/workers")).status_code == 200
        await one.post("/logout")
        assert (await other.get("/workers")).status_code == 200


async def test_another_programs_cookies_do_not_hide_the_session(mesh: TaskMesh) -> None:
    async with browser(mesh, token=TOKEN) as client:
        await client.post("/login", data={"token": TOKEN})
        ours = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        client.cookies.clear()
        cookies = f'a[b]=c; bad key={{"x": 1}}; d="; {ours}'
        assert (await client.get("/workers", headers={"Cookie": cookies})).status_code == 200


async def test_a_newline_behind_the_token_is_no_part_of_it(mesh: TaskMesh) -> None:
    async with browser(mesh, token=f"{TOKEN}\n") as client:
        assert (await client.post("/login", data={"token": f"{TOKEN} "})).status_code == 303
        client.cookies.clear()
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert (await client.get("/api/v1/stats", headers=bearer)).status_code == 200


async def test_over_https_the_session_is_never_sent_in_the_clear(mesh: TaskMesh) -> None:
    async with browser(mesh, token=TOKEN) as client:
        client.base_url = httpx.URL("https://ops.example")
        answer = await client.post("/login", data={"token": TOKEN}, headers={"Origin": "https://ops.example"})
        assert "Secure" in answer.headers["set-cookie"]


async def test_read_only_refuses_every_operation_that_changes_anything(mesh: TaskMesh) -> None:
    changing = [operation for operation in OPERATIONS.values() if operation.changes]
    assert len(changing) > 20
    async with browser(mesh, read_only=True) as client:
        for operation in changing:
            answer = await client.request(operation.method, f"/api/v1{operation.path}", json={})
            assert answer.status_code == 403, operation.name
            assert (await client.post(f"/do/{operation.name}", data={})).status_code == 403, operation.name


async def test_what_is_told_on_the_next_page_is_escaped_and_short_enough_for_a_cookie(mesh: TaskMesh) -> None:
    nasty = "<img src=x onerror=alert(1)>"
    async with browser(mesh) as client:
        answer = await client.post("/do/task.cancel", data={"name": "work", "key": nasty, "back": "/workers"})
        page = (await client.get(answer.headers["location"])).text
        assert nasty not in page
        assert "&lt;img src=x" in page
        for key in ("\u4e2d" * 170, "\U0001f600" * 128):
            answer = await client.post("/do/task.cancel", data={"name": "work", "key": key, "back": "/workers"})
            assert len(answer.headers["set-cookie"]) < 4_000
            assert key[:20] in (await client.get(answer.headers["location"])).text


async def test_read_only_means_that_nothing_can_be_changed(mesh: TaskMesh) -> None:
    await mesh.publish("work", "k")
    async with browser(mesh, read_only=True) as client:
        for path in (CANCEL, "/do/task.cancel", "/do-selected", "/api/v1/bulk/delete", "/api/v1/tasks"):
            answer = await client.post(path, data={"name": "work", "key": "k"})
            assert answer.status_code == 403, path
        assert (await client.delete("/api/v1/tasks/work/k")).status_code == 403
        page = await client.get("/task?name=work&key=k")
        assert "<form" not in page.text.replace('<form method="dialog">', "")
    assert (await mesh.get("work", "k")).status == "INIT"


def test_a_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(InvalidOption, match="at least 16"):
        create_app(TaskMesh("mongodb://nowhere"), token="secret")


async def test_every_answer_keeps_scripts_and_frames_out(client: httpx.AsyncClient) -> None:
    refused = await client.post("/do/task.cancel", headers={"Origin": "https://evil.example"})
    paths = (
        "/",
        "/tasks",
        "/no-such-page",
        "/api/v1/stats",
        "/static/app.js",
        "/login",
        "/api/v1/no-such-path",
        "/livez",
    )
    for answer in [refused, *[await client.get(path) for path in paths]]:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
