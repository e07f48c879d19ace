"""Start processes from a server of gRPC while it serves, as Ray does for each of its clients.

Ray is not needed. gRPC's handlers of a fork abort or hang some of the processes (Ray's issue
63202); with GRPC_ENABLE_FORK_SUPPORT=0 there are no handlers.

    python benchmarks/forks.py --forks 600
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import environment

RESULTS = Path(__file__).parent / "results" / "forks.json"
HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"
CALLERS = 2  # threads that call the server all the time
PAUSE_SECONDS = 0.002  # of a caller between two calls
START_SECONDS = 20.0  # until a process is called one that hangs


def served() -> Any:
    """Serve calls of this process itself, for as long as the answer has a name."""
    import grpc

    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("of", {"one": answer}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def calls() -> None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")  # which would close without a name
        call = channel.unary_unary("/of/one")
        while True:
            call(b"")
            time.sleep(PAUSE_SECONDS)

    for _ in range(CALLERS):
        threading.Thread(target=calls, daemon=True).start()
    time.sleep(1.0)
    return server


def forks(count: int) -> None:
    """Start processes that do nothing, and print after each how many ended well."""
    server, well = served(), 0
    for number in range(1, count + 1):
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", ""],
            preexec_fn=lambda: None,  # noqa: PLW1509 -- Ray gives one, and Python forks for it
            stdin=subprocess.DEVNULL,
        )
        well += process.wait() == 0
        print(number, well, flush=True)
    server.stop(None)
    os._exit(0)  # callers never end


def outcome(count: int, variables: dict[str, str]) -> Counter[str]:
    """How many of so many processes ended well, were aborted, or hung."""
    found, left = Counter[str](), count
    inherited = {name: value for name, value in os.environ.items() if name != HANDLERS}
    while left:
        command = [sys.executable, __file__, "--forks", str(left), "--serve"]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inherited | variables,
        ) as server:
            stuck = threading.Event()
            number, well = last(server, stuck)
            found += Counter({"well": well, "aborted": number - well})
            left -= number
            if stuck.is_set():  # with it hangs its parent, which waits until it is started
                found["hung"] += 1
                left -= 1
    return found


def last(server: subprocess.Popen[bytes], stuck: threading.Event) -> tuple[int, int]:
    """The last line of a server, which is ended once it has been silent for too long."""

    def end() -> None:
        stuck.set()
        server.kill()

    assert server.stdout
    number = well = 0
    while True:
        timer = threading.Timer(START_SECONDS, end)
        timer.start()
        line = server.stdout.readline()
        timer.cancel()
        if not line:
            return number, well
        number, well = map(int, line.split())


def main() -> None:
    """Print and keep what came of the processes, with gRPC's handlers and without."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forks", type=int, default=600)
    parser.add_argument("--serve", action="store_true", help="be the server itself")
    asked = parser.parse_args()
    if asked.serve:
        forks(asked.forks)
    figures = {
        "what": __doc__.partition("\n")[0],
        "environment": environment() | {"grpcio": importlib.metadata.version("grpcio")},
        "processes": asked.forks,
        "with handlers": outcome(asked.forks, {}),
        f"with {HANDLERS}=0": outcome(asked.forks, {HANDLERS: "0"}),
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
