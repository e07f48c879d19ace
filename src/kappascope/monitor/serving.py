"""The page of a run, served on the loopback address while the run goes on, and nothing else.

Two addresses answer, and only to GET: the page and its document. The ``Host`` of a request must be
this machine's own name: a stranger's page whose name was made to lead to the loopback address
(DNS rebinding) is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any, cast

from kappascope.monitor.overview import seconds_of_silence, state
from kappascope.monitor.record import Run
from kappascope.monitor.report import run_document, run_page
from kappascope.refusal import Refusal
from kappascope.system.files import strict
from kappascope.text import error_text

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 2.0  # between two questions of a page that follows a run
PATIENCE_SECONDS = 10.0  # for a request that does not come to its end
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


@contextmanager
def served(run: Run, port: int = 0) -> Iterator[str]:
    """Serve the page of a run until the context is left; its address is given.

    >>> from tempfile import TemporaryDirectory
    >>> from pathlib import Path
    >>> with TemporaryDirectory() as folder, served(Run(Path(folder))) as address:
    ...     address.rpartition(":")[0]
    'http://127.0.0.1'
    """
    content = _Content(run)
    handler = type("Handler", (_Handler,), {"content": content})
    try:
        server = _Server((LOOPBACK, port), handler)
    except (OSError, OverflowError) as error:
        wrong = f"cannot be listened on: {getattr(error, 'strerror', None) or error}"
        raise Refusal(5, f"port {port}", wrong, "name another, or none for a free one") from error
    thread = Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """A server whose requests end with it, and whose errors are no text on the terminal."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the run on the terminal is worth more than a broken connection."""


class _Content:
    """The page and its document as they are now; what has not changed is not made again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._lock = Lock()
        self._document, self._state = b"", ""

    def page(self) -> bytes:
        with self._lock:
            self.run.refresh()
            return run_page(self.run, connects="'self'", seconds=POLL_SECONDS).encode()

    def document(self) -> bytes:
        with self._lock:
            is_new, silence = self.run.refresh() > 0, seconds_of_silence(self.run)
            if is_new or self._state != state(self.run, silence):  # which silence changes, too
                self._state = state(self.run, silence)
                self._document = strict(run_document(self.run, silence))
            return self._document


class _Handler(BaseHTTPRequestHandler):
    """Answer GET of the page and of its document, to requests for this machine by name."""

    content: _Content
    timeout = PATIENCE_SECONDS
    server_version, sys_version = "kappascope", ""

    def do_GET(self) -> None:
        """Answer a request, with the reason where that cannot be done."""
        path = self.path.partition("?")[0]
        try:
            if not self._is_for_us():
                self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this page is for 127.0.0.1")
            elif path == "/":
                self._answer(HTTPStatus.OK, self.content.page(), "text/html; charset=utf-8")
            elif path == "/run.json":
                self._answer(HTTPStatus.OK, self.content.document(), "application/json")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"only / and /run.json are here")
        except ConnectionError:  # who asked has gone
            self.close_connection = True
        except Exception as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, error_text(error).encode())

    def _is_for_us(self) -> bool:
        port = cast(ThreadingHTTPServer, self.server).server_port
        names = self.headers.get_all("Host") or []
        return len(names) == 1 and names[0] in (f"{LOOPBACK}:{port}", f"localhost:{port}")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        for name, value in (HEADERS | {"ETag": tag}).items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *given: Any) -> None:
        """Say nothing of requests: the terminal shows the run."""
