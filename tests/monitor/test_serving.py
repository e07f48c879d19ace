"""A run served on the loopback address: two addresses, one machine, and what is new."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lab.test_report import Visit, browser

from kappascope.monitor.record import Recorder, Run
from kappascope.monitor.serving import served
from kappascope.refusal import Refusal
from monitored_runs import write_example

__all__ = ["browser"]  # a fixture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_example(tmp_path, closed=False)


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    with served(Run.read(folder)) as address:
        yield int(address.rstrip("/").rpartition(":")[2])


def ask(
    port: int, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_the_page_and_its_document_are_served(port: int) -> None:
    status, page, headers = ask(port)
    assert status == 200 and b"Run of" in page and headers["Content-Type"].startswith("text/html")
    assert b"connect-src &#39;self&#39;" in page and b"data-poll" in page
    status, body, _ = ask(port, "/run.json?1")
    assert status == 200 and json.loads(body)["step"] == 200


def test_the_document_tells_what_was_written_since(port: int, folder: Path) -> None:
    _, before, headers = ask(port, "/run.json")
    assert ask(port, "/run.json", **{"If-None-Match": headers["ETag"]})[:2] == (304, b"")
    recorder = Recorder(folder)
    recorder.write({"kind": "log", "step": 220, "values": {"loss": 1.0}})
    recorder.close()
    status, after, _ = ask(port, "/run.json", **{"If-None-Match": headers["ETag"]})
    assert status == 200 and json.loads(after)["step"] == 220 and after != before


def test_a_page_tells_whether_its_run_is_running(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(folder)
    recorder.write({"kind": "start", "step": 220, "time": time.time()})
    recorder.write({"kind": "reading", "step": 220, "time": time.time(), "rows": {}})
    recorder.close()
    with served(Run.read(folder)) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        for path in ("/", "/run.json"):
            assert b"running" in ask(port, path)[1]
        monkeypatch.setattr("kappascope.monitor.overview.SILENT_SECONDS", 0.0)  # it was killed
        for path in ("/", "/run.json"):
            assert b"the run goes on, or was killed" in ask(port, path)[1]


@pytest.mark.parametrize(
    "path", ["/index.html", "/segment-000001.jsonl", "/../etc/passwd", "/run.json/", "*"]
)
def test_nothing_else_is_served(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get_is_answered(port: int, method: str) -> None:
    assert ask(port, method=method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", "localhost"])
def test_a_request_under_a_strangers_name_is_refused(port: int, host: str) -> None:
    status, body, _ = ask(port, "/run.json", Host=host)
    assert status == 421 and b"loss" not in body
    assert ask(port, "/run.json", Host=f"localhost:{port}")[0] == 200


def test_a_request_without_a_host_or_with_two_is_refused(port: int) -> None:
    for lines in ("", f"Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stream:
            stream.sendall(f"GET / HTTP/1.0\r\n{lines}\r\n".encode())
            assert b" 421 " in stream.makefile("rb").readline()


def test_it_listens_on_the_loopback_address_alone(folder: Path) -> None:
    with served(Run.read(folder)) as address:
        assert address.startswith("http://127.0.0.1:")
        port = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(Refusal, match=f"port {port}: cannot be listened on"):
            served(Run.read(folder), port).__enter__()
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_a_record_that_went_away_costs_no_page(port: int, folder: Path) -> None:
    for segment in folder.iterdir():
        segment.unlink()
    folder.rmdir()
    assert ask(port)[0] == 200


def test_a_page_follows_its_run(
    browser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kappascope.monitor.serving.POLL_SECONDS", 0.1)
    with served(Run.read(folder)) as address:
        visit = Visit(browser, address)
        visit.page.locator("[data-choice=quantity]").select_option("swallowed")
        assert "Step 200" in visit.page.locator(".opening").inner_text()
        recorder = Recorder(folder)
        recorder.write({"kind": "log", "step": 240, "values": {"loss": 1.0}})
        alert = {"name": "dead-row", "matrix": "h.0.mlp.fc1.weight", "text": "row 3 is dead"}
        recorder.write({"kind": "alert", "step": 240, **alert})
        recorder.write({"kind": "end", "step": 240})
        recorder.close()
        visit.page.locator("ol.alerts", has_text="row 3 is dead").wait_for()
        assert "Step 240" in visit.page.locator(".opening").inner_text()
        visit.page.locator(".live", has_text="closed").wait_for()
        assert visit.page.locator("[data-choice=quantity]").input_value() == "swallowed"
        assert visit.complaints == []
    visit.page.locator(".live", has_text="no answer: kappascope watch has ended").wait_for()
    visit.context.close()
