"""Who may come in, and what their browsers may do: token, origin, host, read-only, and the headers of every answer.

Without a token, only requests to a loopback name are served (a page elsewhere can make a browser resolve its own name to
127.0.0.1). What changes something has to come from the same origin by the browser's own word (`Sec-Fetch-Site`, which no page
can set; else `Origin`, which has to name our host); where no browser speaks, by a header that no foreign page can send unasked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskmesh.model.jsonable import to_json
from taskmesh.store.payloads import concealed

SHORTEST_TOKEN = 16
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.\-]+)(:[0-9]{1,5})?\Z")
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_OPEN = frozenset({"/login", "/livez", "/readyz"})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What the guard asks for."""

    token: str | None = None
    read_only: bool = False
    hosts: Collection[str] | None = None
    """Host names that requests may use; None: any."""

    def session(self) -> tuple[str, str]:
        """Return the cookie that a browser which has shown the token keeps instead of it: its name and its value.

        Browsers share cookies between all ports of a host. Each token has its own cookie name: two dashboards can be open.
        """
        key = (self.token or "").encode()
        name = hmac.new(key, b"taskmesh web name", hashlib.sha256).hexdigest()[:8]
        return f"taskmesh_{name}", hmac.new(key, b"taskmesh web session", hashlib.sha256).hexdigest()

    def knows(self, token: str) -> bool:
        """Whether this is the token, compared in constant time."""
        mine = hashlib.sha256((self.token or "").encode()).digest()
        return hmac.compare_digest(mine, hashlib.sha256(token.strip().encode("utf-8", "replace")).digest())


class Guard:
    """ASGI middleware that checks every request."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
        else:
            with concealed():
                await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the answer to a request that may not come in, or None."""
        rules, path = self._rules, path_of(scope)
        if rules.hosts is not None and _host(headers) not in rules.hosts:
            return _refused(
                400,
                "this address is served under loopback names only: use 127.0.0.1 or localhost, or start it with a token",
            )
        by_token = rules.token is not None and self._has_token(headers)
        if rules.token is not None and not by_token and not self._has_session(scope) and path not in _OPEN:
            if path.startswith("/static/"):
                return None
            if path.startswith("/api/") or path == "/metrics" or scope["method"] not in _HARMLESS:
                return _refused(
                    401, "a token is needed: send `Authorization: Bearer …`", {"WWW-Authenticate": "Bearer"}
                )
            asked = quote(path + ("?" + scope["query_string"].decode("latin-1") if scope["query_string"] else ""))
            return RedirectResponse(f"{prefix_of(scope)}/login?then={asked}", 303)
        if scope["method"] in _HARMLESS:
            return None
        if not by_token and not _is_of_same_origin(headers):
            return _refused(403, _why_foreign(headers))
        if rules.read_only and path not in ("/login", "/logout"):
            return _refused(403, "this dashboard is read-only")
        return None

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._rules.knows(token)

    def _has_session(self, scope: Scope) -> bool:
        name, value = self._rules.session()
        kept = HTTPConnection(scope).cookies.get(name, "")
        return hmac.compare_digest(value.encode(), kept.encode("utf-8", "replace"))


def prefix_of(scope: Scope) -> str:
    """Return the path under which the app is mounted, without a slash at its end."""
    base: str = scope["app"].state.base_path if "app" in scope else ""
    return (base or str(scope.get("root_path", ""))).rstrip("/")


def path_of(scope: Scope) -> str:
    """Return the path asked for, as seen from the app."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _host(headers: Headers) -> str | None:
    """Return the requested host without its port; None unless it is exactly one host."""
    given = headers.getlist("host")
    match = _HOST.match(given[0]) if len(given) == 1 else None
    return None if match is None else match.group(1).lower()


def _is_of_same_origin(headers: Headers) -> bool:
    """Whether a change comes from our own pages, or from a program that says so."""
    site = headers.get("sec-fetch-site")
    if site == "same-origin":  # also behind a proxy that tells us another host than the browser's
        return True
    if site not in (None, "none"):
        return False
    origin = headers.get("origin")
    if origin is not None:
        try:
            return origin != "null" and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        except ValueError:  # it is no address at all
            return False
    return site is not None or "x-taskmesh" in headers


def _why_foreign(headers: Headers) -> str:
    """Say why a change is refused: the cause is usually a proxy, not an attack."""
    said = "a change has to come from these pages: a program sends the header `X-Taskmesh: 1`, or the token"
    if (origin := headers.get("origin")) is None or headers.get("sec-fetch-site") not in (None, "none"):
        return said
    return (
        f"{said}. This request comes from a page of {origin}, and asks for {headers.get('host', 'nothing')}: if a proxy is "
        "between them, let it pass the Host header on (nginx: proxy_set_header Host $http_host)"
    )


def _refused(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = to_json({"error": "Refused", "message": message})
    return Response(body, status, headers=headers, media_type="application/json")
