"""Jobs, threads and forks beside each other, and ends of the interpreter, all while copies are in flight."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import ready_python
from small_models import Stack, assert_equal, ids, plain, stack, train

import memo

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


@pytest.mark.parametrize("alpha", [1.0, 0.0])
def test_threads_that_train_two_models_with_two_managers_change_nothing(alpha: float, tmp_path: Path) -> None:
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
