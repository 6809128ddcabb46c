"""Jobs, threads and forks beside each other, and ends of the interpreter, all while copies are in flight."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import ready_python
from small_models import Stack, assert_equal, ids, plain, stack, train

import memo
from memo.swap import HostPool
from memo.swap.recompute.tape import log, operators

SUPPORT = Path(__file__).parent.parent / "support"

# Writes take a while, so that some are in flight at any time after a forward; `writing` counts them.
SLOW = f"""
import contextlib, os, sys, time, threading
sys.path.insert(0, {str(SUPPORT)!r})
import torch
import memo
from small_models import *
pwrite, writing, lock = os.pwrite, [0], threading.Lock()
def slow(*arguments):
    with lock:
        writing[0] += 1
    time.sleep(0.05)
    try:
        return pwrite(*arguments)
    finally:
        with lock:
            writing[0] -= 1
os.pwrite = slow
def wait_for_a_write():
    end = time.monotonic() + 60
    while not writing[0]:
        assert time.monotonic() < end
        time.sleep(0.001)
def open_manager(model, **options):
    return memo.offload(model, alpha=1.0, disk=sys.argv[1], min_bytes=512, **options)
"""

ENDS = {
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "exception": ("raise RuntimeError('of the program')", 1),
}


@pytest.mark.parametrize("attached", [False, True], ids=["entered", "attached"])
@pytest.mark.parametrize("end", ENDS)
def test_an_end_with_copies_in_flight_is_the_programs_own_and_leaves_nothing(
    end: str, attached: bool, tmp_path: Path
) -> None:
    """It comes within the forward, since a manager waits for the last copies after the last layer."""
    statement, code = ENDS[end]
    program = f"""
def end(*arguments):
    wait_for_a_write()
    print("writing", flush=True)
    {statement}
model = stack()
model.layers[1].norm2.register_forward_pre_hook(end)
manager = open_manager(model)
with {"contextlib.nullcontext(manager.attach())" if attached else "manager"}:
    model(ids())
"""
    result = ready_python.run("-c", SLOW + program, tmp_path, timeout=30)
    assert result.stdout == "writing\n", result.stderr
    assert result.returncode == code, result.stderr
    assert list(tmp_path.iterdir()) == []
    if code == 1:
        assert result.stderr.count("Traceback") == 1
        assert result.stderr.endswith("RuntimeError: of the program\n")
    else:
        assert result.stderr == ""


def test_data_loader_workers_forked_while_copies_are_in_flight_change_nothing(tmp_path: Path) -> None:
    program = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, step):
        return ids(step)
def load(*arguments):
    wait_for_a_write()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(row, ids(number)) for number, row in enumerate(loader))
    loads.append(1)
loads = []
model = stack()
manager = open_manager(model)
hook = model.layers[1].norm2.register_forward_pre_hook(load)
done = train(model, lambda step: model(ids(step)), manager)
assert len(loads) == 3
manager.close()
assert_equal(done, plain())
print("equal")
"""
    result = ready_python.run("-c", SLOW + program, tmp_path, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "equal\n"
    assert list(tmp_path.iterdir()) == []


def test_jobs_with_one_scratch_directory_and_equal_host_budgets_do_not_see_each_other(tmp_path: Path) -> None:
    """Each has a budget of its own, spills beyond it, and computes what it does alone."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = """
model = stack()
manager = open_manager(model, host="64KiB")
def forward(step):
    loss = model(ids(step))
    open(sys.argv[2] + f".{step}", "w").close()
    end = time.monotonic() + 60
    while not os.path.exists(sys.argv[3] + f".{step}"):  # both have saved before one begins backward
        assert time.monotonic() < end
        time.sleep(0.001)
    return loss
assert_equal(train(model, forward, manager), plain())
assert manager.stats.packed > 0
manager.close()
print("equal")
"""
    names = [str(tmp_path / name) for name in ("one", "two")]
    jobs = [ready_python.start("-c", SLOW + program, scratch, *order) for order in (names, names[::-1])]
    for job in jobs:
        out, errors = job.communicate(120)
        assert (job.returncode, out) == (0, "equal\n"), errors
    assert list(scratch.iterdir()) == []


# Two jobs with one host budget; slabs grow page by page, so that neither takes all of a small one at once.
SHARING = """
import itertools
from memo.swap.tiers.host_and_disk import HostTier
HostTier.__init__.__kwdefaults__["segment_bytes"] = 4096
def meet(name):
    open(f"{sys.argv[2]}.{name}", "w").close()
    end = time.monotonic() + 60
    while not os.path.exists(f"{sys.argv[3]}.{name}"):
        assert time.monotonic() < end
        time.sleep(0.001)
model = stack()
manager = open_manager(model, host=int(sys.argv[5]), host_pool=sys.argv[4])
host, disk = manager._engine.tiers
meetings = itertools.count()
def tell(*_):  # both have taken what they tell, and neither takes more or gives back until the other has told
    print(host.reserved, disk.used, flush=True)
    meet(next(meetings))
def forward(step):
    loss = model(ids(step))
    tell()
    return loss
"""


def _free(path: Path, budget: int) -> int:
    """Bytes of a shared budget that nobody holds."""
    pool = HostPool(path, budget)
    try:
        return pool.free
    finally:
        pool.close()


def test_jobs_with_one_host_pool_never_hold_more_than_its_budget(tmp_path: Path) -> None:
    """Each needs 392 KiB of 512; together they leave less than a tensor takes, spill the rest, and compute as alone."""
    scratch, pool, budget = tmp_path / "scratch", tmp_path / "pool", 512 << 10
    scratch.mkdir()
    program = """
for layer in model.layers:
    layer.register_forward_hook(tell)
assert_equal(train(model, forward, manager), plain())
meet("end")
manager.close()
print("equal")
"""
    names = [str(tmp_path / name) for name in ("one", "two")]
    jobs = [
        ready_python.start("-c", SLOW + SHARING + program, scratch, *order, pool, budget)
        for order in (names, names[::-1])
    ]
    said = [job.communicate(120) for job in jobs]
    for job, (out, errors) in zip(jobs, said, strict=True):
        assert job.returncode == 0, errors
        assert out.endswith("\nequal\n")
    told = [[tuple(map(int, line.split())) for line in out.splitlines()[:-1]] for out, _ in said]
    sums = [one[0] + other[0] for one, other in zip(*told, strict=True)]
    smallest = 12 << 10  # of the tensors that are spilled; who comes first decides how many pages fewer are left
    assert budget - smallest < max(sums) <= budget
    assert all(max(host for host, _ in job) > 0 for job in told)
    assert any(disk > 0 for job in told for _, disk in job)
    assert _free(pool, budget) == budget
    assert list(scratch.iterdir()) == []


def test_a_killed_job_leaves_its_share_of_the_pool_to_the_others(tmp_path: Path) -> None:
    scratch, pool, budget = tmp_path / "scratch", tmp_path / "pool", 64 << 10
    scratch.mkdir()
    first = """
with manager:
    model(ids(0))
print("took", host.reserved, flush=True)
time.sleep(600)
"""
    names = [str(tmp_path / name) for name in ("one", "two")]
    killed = ready_python.start("-c", SLOW + SHARING + first, scratch, *names, pool, budget)
    end = time.monotonic() + 120
    while _free(pool, budget):
        assert time.monotonic() < end
        assert killed.poll() is None, killed.communicate(1)
        time.sleep(0.01)
    second = """
with manager:
    model(ids(0))
print(host.reserved, flush=True)
meet("killed")
assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
print(host.reserved)
manager.close()
"""
    other = ready_python.start("-c", SLOW + SHARING + second, scratch, *names[::-1], pool, budget)
    while not Path(f"{names[1]}.killed").exists():
        assert time.monotonic() < end
        assert other.poll() is None, other.communicate(1)
        time.sleep(0.01)
    killed.kill()
    killed.communicate(30)
    Path(f"{names[0]}.killed").touch()
    out, errors = other.communicate(120)
    assert (other.returncode, out) == (0, f"0\n{budget}\n"), errors
    assert _free(pool, budget) == budget
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_threads_that_train_two_models_with_two_managers_change_nothing(
    alpha: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They switch after a microsecond each, as do those of the disk tier, and neither finds what another has looked up."""
    monkeypatch.setattr(log, "_REFS", {})
    monkeypatch.setattr(operators, "_OPERATORS", {})
    models = [stack(), stack()]
    managers = [memo.offload(model, alpha=alpha, disk=tmp_path, min_bytes=512) for model in models]
    forwarded, steps = threading.Barrier(2, timeout=60), [[], []]  # type: ignore[var-annotated]

    def work(number: int, model: Stack) -> None:
        def forward(step: int) -> object:
            loss = model(ids(step))
            forwarded.wait()  # both models have saved before one begins backward
            return loss

        steps[number] = train(model, forward, managers[number])  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=item) for item in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for manager, done in zip(managers, steps, strict=True):
        assert manager.stats.packed > 0
        manager.close()
        assert_equal(done, plain())
    assert list(tmp_path.iterdir()) == []
