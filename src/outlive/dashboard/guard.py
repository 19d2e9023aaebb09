"""Who may ask the dashboard for what: checked before anything else, for every request.

Reads   headers and the query of a request.
Writes  answers that refuse; the headers that every answer has; the cookie of a first visit.
Never   lets a page from elsewhere read or change anything: foreign names (DNS rebinding), foreign origins and changes
        by GET are refused, and no header invites other origins.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACTION_HEADER = "x-outlive"  # no form can send it, and a script of another origin may not
LEAST_TOKEN = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ALWAYS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_served(host: str) -> frozenset[str]:
    """Names by which a browser may call a server that listens at `host`."""
    names = {*_LOOPBACK, host.lower()}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        if ipaddress_or_none(host) in (ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::")):
            import psutil

            names |= {each.address.lower() for found in psutil.net_if_addrs().values() for each in found}
    return frozenset(names)


def ipaddress_or_none(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def host_name(header: str) -> str:
    """«[::1]:7117» → «::1», «localhost:7117» → «localhost»."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    name, _, port = header.rpartition(":")
    return (name if name and port.isdigit() else header).lower()


class Guard:
    """Around the application."""

    def __init__(self, app: ASGIApp, *, names: frozenset[str], token: str | None, port: int) -> None:
        self.app = app
        self._names = names
        self._token = token
        self._visitor = secrets.token_urlsafe(32)  # what the cookie has: not the token itself
        self._cookie = f"outlive-dash-{port}"  # browsers do not tell ports of a host apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _ALWAYS.items():
                    headers[name] = value
            await send(message)

        refused = self._refuse(scope)
        await (refused or self.app)(scope, receive, guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or host_name(host) not in self._names:
            return _refusal(421, "this server does not answer to that name; open the address that it printed")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not _navigates(headers):
            return _refusal(403, "requests from other sites are not answered")
        entered = self._enter(scope, headers)
        if entered is not None:
            return entered
        if scope["method"] in ("GET", "HEAD"):
            return None
        if headers.get("origin", "") not in (f"http://{host}", f"https://{host}"):
            return _refusal(403, "changes are asked for by the page itself, not from elsewhere")
        if headers.get(ACTION_HEADER) != "1":
            return _refusal(403, f"changes need the header {ACTION_HEADER}: 1")
        return None

    def _enter(self, scope: Scope, headers: Headers) -> Response | None:
        """None: come in."""
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        told = [value for name, value in query if name == "token"]
        if told and scope["method"] == "GET":
            if not _same(told[-1], self._token):
                return _refusal(401, "that is not the token")
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            path = "/" + scope["path"].lstrip("/")  # «//elsewhere» would be another site
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, self._visitor, httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), self._token):
            return None
        if _same(cookie_parser(headers.get("cookie", "")).get(self._cookie, ""), self._visitor):
            return None
        return _refusal(
            401, "this page needs its token: open the link that `outlive dash` printed, or `outlive dash --list`"
        )


def _navigates(headers: Headers) -> bool:
    """Somebody follows a link to the page: that shows it to them alone."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _same(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), right.encode("utf-8", "replace"))


def _refusal(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)
