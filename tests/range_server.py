"""A web server on the loopback address that sends parts of files, and errs as it is told to."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """Files by path, what was asked for, and how to err."""

    files: dict[str, bytes]
    url: str = ""
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    fault: str = ""  # "whole", "short", "long", "other part", "no length", "changing", "slow", ...
    version: int = 0

    @property
    def sent(self) -> int:
        return sum(end - begin for _, begin, end in self.asked)


def failure(served: Served, path: str, part: re.Match[str] | None) -> int:
    """The status of an answer that holds nothing; 0 for one that holds what was asked for."""
    if served.fault.isdigit():
        return int(served.fault)
    if served.fault == "circle":
        return 302
    if served.fault == "busy config" and "config" in path and not served.version:
        served.version = 1  # and no more
        return 503
    if path.partition("?")[0] not in served.files or part is None:
        return 404
    if served.fault == "busy" and part[0] != "bytes=0-0" and not served.version:
        served.version = 1  # and no more
        return 503
    return 0


@contextmanager
def serving(files: dict[str, bytes], fault: str = "") -> Iterator[Served]:
    served = Served(files, fault=fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            data = served.files.get(self.path.partition("?")[0])
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if served.fault == "hangs up" and "config" in self.path:
                self.close_connection = True
                return
            status = failure(served, self.path, part)
            if status:
                self.send_response(status)
                self.send_header("Location", self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            assert data is not None and part is not None
            begin, end = int(part[1]), min(int(part[2]) + 1, len(data))
            served.asked.append((self.path, begin, end))
            body = data[begin:end]
            real = end - begin > 1 or begin > 0  # not the question for its length
            if served.fault == "slow" and real:
                time.sleep(5)
            if served.fault in ("changing", "growing") and real:
                served.version += 1
            if served.fault == "long" and real:
                body += b"more"
            whole = served.fault == "whole"
            self.send_response(200 if whole else 206)
            lengths = {
                "no length": "*",
                "odd length": "\xb2",
                "huge": 10**18,
                "long number": "9" * 5000,
            }
            total = lengths.get(served.fault, len(data))
            if served.fault == "growing":
                total = len(data) + served.version
            if served.fault == "packed":
                self.send_header("Content-Encoding", "gzip")
            shift = 8 if served.fault == "other part" and real else 0
            if not whole:
                self.send_header("Content-Range", f"bytes {begin + shift}-{end - 1}/{total}")
            if served.fault not in ("growing", "busy"):
                self.send_header("ETag", f'"{served.version}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for byte in body if served.fault == "dripping" and real else b"":
                with suppress(OSError):
                    self.wfile.write(bytes([byte]))
                time.sleep(0.1)
            self.wfile.write(body[: len(body) // 2] if served.fault == "short" and real else body)
            if served.fault == "short" and real:
                self.close_connection = True

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:
            """Say nothing of clients that went away."""

    server = Quiet(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
