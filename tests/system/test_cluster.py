"""Work on a cluster of three nodes: the same answers as here, whatever is lost on the way."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kappascope.clinic.diagnose import case, diagnose
from kappascope.refusal import Refusal
from kappascope.system import cluster as under_test
from kappascope.system.cluster import Cluster, engine_of
from kappascope.system.extras import optional
from kappascope.system.workers import Processes
from processes import alive, descendants, until
from tiny_experiments import BAD, TOY
from tiny_runs import COMMAND, complete, sha
from worker_tasks import kills_ray, kills_ray_once, marks, raylet, stops_ray, task

ray = pytest.importorskip("ray", reason="the extra kappascope[ray] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own
RAY_IN_PRIVATE = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
    "RAY_USAGE_STATS_ENABLED": "0",
}
WORKER = Processes(2, limit=5.0, retries=0, loaded=("torch",))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Three machines as far as Ray can tell; the third would give other bits."""
    from ray.cluster_utils import Cluster as Machines

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    machines = Machines(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    machines.add_node(num_cpus=1)
    machines.add_node(num_cpus=1, env_vars={"NPY_DISABLE_CPU_FEATURES": "AVX512F"})
    machines.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = machines.address
    yield machines
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()
    machines.shutdown()


@pytest.mark.usefixtures("nodes")
class TestOnThreeNodes:
    """What holds wherever an item is done."""

    def test_every_misfortune_is_the_failure_that_it_is_here(self) -> None:
        items = ["killed", "raises", "awkward", "exits", "memory", "ends", "threads", "fine"]
        here, there = (
            {done.item: (done.failure, type(done.error)) for done in engine.run(task, items)}
            for engine in (WORKER, Cluster(WORKER))
        )
        assert here == there and sum(bool(failure) for failure, _ in there.values()) == 6

    def test_an_item_that_hangs_is_ended_at_its_time_limit(self) -> None:
        (done,) = Cluster(Processes(1, limit=1.0, loaded=("torch",))).run(task, ["hangs"])
        assert done.failure == "timeout: more than 1 s"

    def test_tables_are_those_of_one_machine_and_failures_too(self, tmp_path: Path) -> None:
        quick = [setting for setting in BAD.grid if setting["kind"] != "hangs"]
        for experiment in (TOY, replace(BAD, grid=quick)):
            engines = {"here": Processes(2), "there": Cluster(Processes(2))}
            results = [complete(experiment, tmp_path / n, e) for n, e in engines.items()]
            assert sha(tmp_path / "here") == sha(tmp_path / "there")
            assert results[0].provenance["failed"] == results[1].provenance["failed"]

    def test_a_checkpoint_is_examined_to_the_same_document(self, tmp_path: Path) -> None:
        weights = {f"layers.{k}.fc.weight": torch.randn(8, 8 + k) for k in range(4)}
        torch.save(weights, tmp_path / "model.pt")
        there = case(str(tmp_path / "model.pt"), cluster=Cluster(WORKER))
        found = there.concluded(row for done in there.examine() for row in done.result)
        assert found.document() == diagnose(tmp_path / "model.pt", jobs=1).document()

    def test_a_node_that_would_give_other_bits_is_not_used_and_named_once(self) -> None:
        told: list[str] = []
        engine = Cluster(WORKER, tell=told.append)
        places = {done.result for done in engine.run(raylet, range(12))}
        assert len(places) == 2 and len(told) == 1
        assert "is not used: its cpu modes is" in told[0]
        assert "NPY_DISABLE_CPU_FEATURES=AVX512F, here" in told[0]

    def test_a_cluster_of_another_kind_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(under_test, "environment", lambda: {"cpu": "of another make"})
        with pytest.raises(Refusal, match="no node would give the bits of this machine: its cpu"):
            list(Cluster(WORKER, tell=lambda text: None).run(task, ["fine"] * 4))

    def test_a_worker_of_ray_that_dies_once_is_replaced(self, tmp_path: Path) -> None:
        (done,) = Cluster(WORKER).run(kills_ray_once, [str(tmp_path / "marker")])
        assert not done.failure

    def test_one_that_always_dies_is_given_up_and_the_rest_is_done(self, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        items = [("dies", str(marker)), ("", "")]
        done = {one.item: one.failure for one in Cluster(WORKER).run(kills_ray, items)}
        assert done[items[0]].startswith("its node was lost") and not done[items[1]]
        assert len(marker.read_text()) == 1 + under_test.LOSSES

    def test_one_that_hangs_inside_ray_is_given_up(self, tmp_path: Path) -> None:
        engine = Cluster(Processes(1, limit=1.0, retries=0, loaded=("torch",)), patience=2.0)
        (done,) = engine.run(stops_ray, [str(tmp_path / "marker")])
        stopped = [int(pid) for pid in (tmp_path / "marker").read_text().split()]
        assert done.failure == "its node does not answer"
        until(lambda: not any(map(alive, stopped)), 10)

    def test_closing_the_iterator_ends_the_work_on_the_nodes(self, tmp_path: Path) -> None:
        # Ray may give it to the node that is not used: short items are taken until it has another
        seconds = [60.0, *(number / 1000 for number in range(60))]
        running = Cluster(WORKER).run(marks, [(str(tmp_path), each) for each in seconds])
        while not any(tmp_path.glob("* 60.0")):
            next(running)
        running.close()
        (resting,) = (int(marker.name.split()[0]) for marker in tmp_path.glob("* 60.0"))
        until(lambda: not alive(resting), 10)

    def test_what_cannot_be_pickled_fails_alone(self) -> None:
        (done,) = Cluster(WORKER).run(lambda item: None, [1])
        assert "pickle" in done.failure

    def test_a_node_that_is_lost_costs_nothing_and_doubles_nothing(
        self, nodes: Any, tmp_path: Path
    ) -> None:
        lost = nodes.add_node(num_cpus=2)
        items = [(str(tmp_path), 0.5 + number / 1000) for number in range(12)]
        killer = threading.Timer(3.0, nodes.remove_node, (lost, False))
        killer.start()
        done = list(Cluster(WORKER, tell=lambda text: None).run(marks, items))
        killer.join()
        assert sorted(one.item for one in done) == sorted(items)
        assert not any(one.failure for one in done)


def test_a_driver_that_is_killed_leaves_no_process_and_its_command_goes_on(tmp_path: Path) -> None:
    command = [*COMMAND, "reproduce", "2", "--jobs", "2", "--out"]
    there = [*command, str(tmp_path / "there"), "--engine", "ray"]
    with subprocess.Popen(there, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        units = tmp_path / "there" / "units"
        until(lambda: units.is_dir() and len(list(units.iterdir())) > 1, 60)
        started = descendants(driver.pid)
        second = subprocess.run(there, capture_output=True, text=True, check=False)
        driver.kill()
    assert second.returncode == 2 and "in use by process" in second.stderr
    until(lambda: not any(map(alive, started)), 10)
    for each in (there, [*command, str(tmp_path / "here")]):
        assert subprocess.run(each, capture_output=True, check=False).returncode == 0
    assert sha(tmp_path / "here") == sha(tmp_path / "there")


def test_no_module_beside_a_model_is_imported(tmp_path: Path) -> None:
    for name in ("torch", "ray", "numpy", "kappascope", "msgpack"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    ended = subprocess.run(
        [*COMMAND, "reproduce", "1", "--jobs", "1", "--engine", "ray", "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "imported").exists()


def test_without_ray_the_refusal_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refusal, match=r"pip install 'kappascope\[ray\]'"):
        list(Cluster(WORKER).run(task, ["fine"]))
    assert optional("json", "ray")  # and what is there is found


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("connection timeout\nand more"), "connection timeout"),
        (
            ConnectionAbortedError("Initialization failure from server:\nTraceback\n  x\nWhy.\n"),
            "Initialization failure from server: Why",
        ),
        (RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.0"),
         "Version mismatch: The cluster was started with: Ray: 2.0"),
        (ValueError(), "ValueError"),
    ],
)  # fmt: skip
def test_an_address_where_nothing_is_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def unreachable(**options: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", unreachable)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Refusal) as refusal:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        Cluster(WORKER, address).warm()
    expected = f"--engine {address}: {told} (see whether"
    assert str(refusal.value).startswith(expected) and refusal.value.code == 5


def test_a_port_that_nothing_listens_on_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(Refusal, match=r"ray://127\.0\.0\.1:1: nothing answers: Conn"):
        Cluster(WORKER, "ray://127.0.0.1:1").warm()
    with pytest.raises(Refusal, match=r"no host and port \(ray://head:10001\)"):
        Cluster(WORKER, "ray://head").warm()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Refusal, match=r"RAY_ADDRESS=127\.0\.0\.1:1: nothing answers"):
        Cluster(WORKER).warm()


@pytest.mark.parametrize("told", under_test.FORK_FAILED)
def test_a_client_whose_server_failed_by_chance_tries_again_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    error = ConnectionAbortedError(f"Initialization failure from server:\nRuntimeError: {told}")
    errors = [error] * (under_test.JOIN_TRIES - 1)

    def init(**options: Any) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = Cluster(WORKER, f"ray://127.0.0.1:{server.getsockname()[1]}")
        engine.warm()
        assert not errors
        errors += [error] * under_test.JOIN_TRIES
        with pytest.raises(Refusal, match=r"GRPC_ENABLE_FORK_SUPPORT=0.*on a node"):
            engine.warm()


def test_a_sigterm_while_ray_starts_ends_us_as_it_would_without_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def terminated(**options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", terminated)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            Cluster(WORKER, f"ray://127.0.0.1:{server.getsockname()[1]}").warm()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


@dataclass(frozen=True)
class Head:
    """A cluster started by hand; routes to it are engines and their environments."""

    pid: int
    as_client: tuple[str, dict[str, str]]
    as_node: tuple[str, dict[str, str]]

    @property
    def working(self) -> list[int]:
        """The numbers of its processes that work for us."""
        return [pid for pid in descendants(self.pid) if works(pid) and alive(pid)]


def works(pid: int) -> bool:
    """Whether a process of a node does our work, or serves one that does."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.startswith(b"ray::kappascope") or b"kappascope.system._server" in command
    return False


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    pytest.importorskip("grpc", reason="Ray serves no clients without the extra ray[client]")
    host, ports = ray.util.get_node_ip_address(), [free_port(), free_port()]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, **RAY_IN_PRIVATE}
    # a folder whose name leaves room for those of Ray's sockets
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        command = [
            *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--port", str(ports[0]), "--ray-client-server-port", str(ports[1])),
            *("--num-cpus", "2", "--object-store-memory", "100000000"),
            *("--include-dashboard", "false", "--temp-dir", folder),
        ]
        name, _, value = under_test.NO_FORK_HANDLERS.partition("=")
        served = {**environment, name: value}
        with subprocess.Popen(command, env=served, start_new_session=True, **quiet) as running:
            try:
                until(lambda: listens(host, ports[1]) or running.poll() is not None, 60)
                if running.poll() is not None:
                    pytest.skip(f"ray start --head ended with exit code {running.returncode}")
                yield Head(
                    running.pid,
                    as_client=(f"ray://{host}:{ports[1]}", environment),
                    as_node=("ray", environment | {"RAY_ADDRESS": f"{host}:{ports[0]}"}),
                )
            finally:
                started = descendants(running.pid)
                running.terminate()
                running.wait(60)
                for pid in filter(alive, started):
                    os.kill(pid, signal.SIGKILL)  # Ray leaves its store behind, say


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Two checkpoints of their own shapes."""
    names = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        weights = {
            f"layers.{k}.fc.weight": torch.randn(8, 9 + number, generator=generator)
            for k in range(2)
        }
        torch.save(weights, tmp_path / f"{number}.pt")
        names.append(str(tmp_path / f"{number}.pt"))
    return names


@pytest.mark.parametrize("command", [("reproduce", "2"), ("study", "toy")], ids=" ".join)
def test_a_head_started_by_hand_gives_the_tables_of_this_machine(
    head: Head, command: tuple[str, ...], tmp_path: Path
) -> None:
    whole = [*COMMAND, *command, "--jobs", "2", "--out"]
    printed([*whole, str(tmp_path / "here")])
    for number, (engine, environment) in enumerate((head.as_client, head.as_node)):
        there = tmp_path / str(number)
        printed([*whole, str(there), "--engine", engine], environment)
        assert sha(there) == sha(tmp_path / "here")


@pytest.mark.parametrize(("command", "most"), [("diagnose", 1), ("survey", 2)])
def test_a_head_started_by_hand_examines_checkpoints_to_the_same_document(
    head: Head, command: str, most: int, models: list[str]
) -> None:
    whole = [*COMMAND, command, *models[:most], "--json"]
    here = printed(whole)
    for engine, environment in (head.as_client, head.as_node):
        assert printed([*whole, "--engine", engine], environment) == here


def test_a_client_that_is_killed_leaves_nothing_on_the_nodes(head: Head, tmp_path: Path) -> None:
    engine, environment = head.as_client
    folder = tmp_path / "there"
    command = [*COMMAND, "reproduce", "2", "--engine", engine, "--out", str(folder)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **quiet) as driver:
        until(lambda: (folder / "units").is_dir() and any((folder / "units").iterdir()))
        assert head.working
        driver.kill()
    until(lambda: not head.working, 10)


def printed(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Give what a command prints, which must succeed."""
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_engines_have_names() -> None:
    assert engine_of("local", WORKER, print) is WORKER
    assert engine_of("ray://head:10001", WORKER, print) == Cluster(WORKER, "ray://head:10001")
