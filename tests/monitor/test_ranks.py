"""Several processes that watch one model: DDP and FSDP2 with gloo on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kappascope.monitor._ranks import Ranks
from kappascope.monitor.record import Run, is_run

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from kappascope import Monitor
from kappascope.monitor import _ranks

kind, folder = sys.argv[1], Path(sys.argv[2])
_ranks.JOIN_SECONDS = 5
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 11))
if kind.startswith("fsdp"):
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    wrapped = fully_shard(model)
elif kind == "flat":
    from torch.distributed.fsdp import FullyShardedDataParallel
    import warnings; warnings.simplefilter("ignore")
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
monitor = None
if kind == "broken" and rank == 1:
    from kappascope.monitor import measure
    measure.components = lambda *_: 1 / 0
    import warnings; warnings.simplefilter("ignore")
if kind != "plain" and (kind != "alone" or rank == 0):
    budget = 0.2 if kind == "fsdp on a budget" else None
    options = {"norms_every": 1, "budget": budget, "strict": kind not in ("broken", "unwritable")}
    monitor = Monitor(folder / "run", every=2, spectra_every=4, **options)
    if budget is not None and rank == 1:  # whose clock would allow it anything
        from kappascope.monitor import monitor as module
        module.time = type("Fast", (), {"perf_counter": lambda: 0.0, "time": lambda: 0.0})
    if kind == "in use":
        import fcntl
        (folder / "run").mkdir(exist_ok=True)
        held = open(folder / "run" / "lock", "w")
        if rank == 0:
            fcntl.flock(held, fcntl.LOCK_EX)
        dist.barrier()
        try:
            monitor.attach(wrapped, optimizer)
        except Exception as error:
            refused = str(error)
        held.close()
        assert "records a run there" in refused
        dist.barrier()
    if kind == "unwritable" and rank == 0:
        (folder / "run").touch()  # a file
        import warnings; warnings.simplefilter("ignore")
    monitor.attach(wrapped, optimizer)
random = torch.Generator().manual_seed(rank)
norms = []
for step in range(6):
    if kind == "drift" and step == 3 and rank == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1.0
    optimizer.zero_grad()
    given = torch.randn(5, 11, generator=random)
    wrapped(given).square().mean().backward()
    optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    norms.append([float(p.detach().norm()) for p in whole])
if monitor is not None:
    monitor.close()
whole = {}
for name, p in model.named_parameters():
    whole[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
if rank == 0:
    torch.save(whole, folder / "weights.pt")
    names = [name for name, _ in model.named_parameters()]
    torch.save([dict(zip(names, each)) for each in norms], folder / "norms.pt")
dist.barrier()
sys.stderr.flush()
os._exit(0)  # gloo's threads abort some processes that end as usual
"""


def run_two(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train in two processes; give the weights at the end."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, kind, str(folder)]
    processes = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=240)[1].decode() for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
            process.communicate()
        raise
    assert [process.returncode for process in processes] == [0, 0], ended
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run_two("plain", tmp_path_factory.mktemp("ranks") / "plain")


def test_ddp_divides_the_work_and_changes_nothing(
    tmp_path: Path, plain: dict[str, torch.Tensor]
) -> None:
    weights = run_two("ddp", tmp_path / "ddp")
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    run = Run.read(tmp_path / "ddp" / "run")
    assert run.is_closed and not run.alerts and run.sessions[0].options["processes"] == 2
    for name in ("0.weight", "2.weight", "4.weight"):
        pairs = run.series(name, "sigma_max")
        assert [step for step, _ in pairs] == [0, 2, 4, 6]
        found = torch.linalg.svdvals(weights[name].double())[0]
        assert pairs[-1][1] == pytest.approx(float(found), rel=1e-9)
        assert len(run.series(name, "signal", 0.0)) == 3


def test_fsdp_gathers_one_matrix_at_a_time(tmp_path: Path) -> None:
    weights = run_two("fsdp", tmp_path / "fsdp")
    run = Run.read(tmp_path / "fsdp" / "run")
    assert run.is_closed and not run.alerts
    for name in ("0.weight", "2.weight", "4.weight"):
        pairs = run.series(name, "condition_number")
        assert [step for step, _ in pairs] == [0, 2, 4, 6]
        values = torch.linalg.svdvals(weights[name].double())
        assert pairs[-1][1] == pytest.approx(float(values[0] / values[-1]), rel=1e-6)
        assert len(run.series(name, "update_size")) == 3
        assert len(run.series(name, "swallowed")) == 3
    norms = torch.load(tmp_path / "fsdp" / "norms.pt", weights_only=True)
    for name in ("0.weight", "2.weight", "4.bias"):
        found = [(step, value) for step, value in run.series(name, "frobenius_norm") if step % 2]
        expected = [(step, pytest.approx(norms[step - 1][name], rel=1e-5)) for step in (1, 3, 5)]
        assert found == expected


def test_a_budget_is_the_same_for_all_processes(tmp_path: Path) -> None:
    run_two("fsdp on a budget", tmp_path / "budget")
    assert Run.read(tmp_path / "budget" / "run").is_closed


def test_replicas_that_drift_apart_are_an_alert(tmp_path: Path) -> None:
    run_two("drift", tmp_path / "drift")
    run = Run.read(tmp_path / "drift" / "run")
    (alert,) = [each for each in run.alerts if each.name == "drift"]
    assert alert.step == 4 and "2.weight" in alert.text


def test_flat_pieces_of_parameters_are_no_replicas(tmp_path: Path) -> None:
    run_two("flat", tmp_path / "flat")
    assert not Run.read(tmp_path / "flat" / "run").alerts


def test_an_error_on_one_process_keeps_nobody_waiting(tmp_path: Path) -> None:
    run_two("broken", tmp_path / "broken")
    run = Run.read(tmp_path / "broken" / "run")
    assert run.is_closed and len(run.series("0.weight", "sigma_max")) == 4
    assert not run.series("2.weight", "sigma_max")


def test_a_record_that_cannot_be_begun_keeps_nobody_waiting(tmp_path: Path) -> None:
    run_two("unwritable", tmp_path / "unwritable")
    assert not is_run(tmp_path / "unwritable" / "run")


def test_every_process_is_refused_a_folder_that_another_run_writes(tmp_path: Path) -> None:
    run_two("in use", tmp_path / "used")
    assert Run.read(tmp_path / "used" / "run").step == 6


def test_a_monitor_on_one_process_waits_for_nobody(tmp_path: Path) -> None:
    run_two("alone", tmp_path / "alone")
    assert Run.read(tmp_path / "alone" / "run").step == 6


def test_work_is_dealt_round() -> None:
    owned = [[Ranks(rank, 3).owns(i) for i in range(7)] for rank in range(3)]
    assert all(sum(column) == 1 for column in zip(*owned, strict=True))
