"""Serves the site of the live database on this machine alone, and changes nothing."""

from __future__ import annotations

import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import urlsplit

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.report.site.markup import page, text
from kernelcat.report.site.results import Results
from kernelcat.store import Measurement

ADDRESS = "127.0.0.1"
FRESH_S = 5.0
"""Seconds for which pages are shown before the database is read again."""
_HOSTS = (ADDRESS, "localhost")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


class Site(ThreadingHTTPServer):
    """The pages of ``results`` at ``port`` of this machine; 0 takes any free port.

    Raises ``InvalidArgument`` where the port is taken, ``StoreError`` where the database cannot be
    read.
    """

    daemon_threads = True

    def __init__(self, results: Results, port: int) -> None:
        self._results, self._lock = results, Lock()
        self._rows: list[Measurement] = results.rows()
        self._pages, self._read_at = results.pages(self._rows), time.monotonic()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise InvalidArgument(f"port {port} cannot be served: {error.strerror}") from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def pages(self) -> dict[str, str]:
        """Pages of the database as it was at most :data:`FRESH_S` ago; raises ``StoreError``."""
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_S:
                rows = self._results.rows()
                if rows != self._rows:
                    self._pages, self._rows = self._results.pages(rows), rows
                self._read_at = time.monotonic()
            return self._pages


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, has_body: bool) -> None:
        status, content = self._content()
        data = content.encode("utf-8")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if has_body:
            self.wfile.write(data)

    def _content(self) -> tuple[HTTPStatus, str]:
        # Another name for this machine may belong to a page elsewhere that wants to read along.
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            return HTTPStatus.FORBIDDEN, _message("Only this machine's own name is served.")
        try:
            pages = self.server.pages()
        except KernelcatError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, _message(str(error))
        name = urlsplit(self.path).path.removeprefix("/") or "index.html"
        if name not in pages:
            return HTTPStatus.NOT_FOUND, _message("There is no such page.")
        return HTTPStatus.OK, pages[name]

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


def _message(words: str) -> str:
    return page("kernelcat", f"<p>{text(words)}</p>\n")
