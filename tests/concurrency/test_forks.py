"""Children forked while a manager is open train without memo, or are refused in one line; none waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import ready_python

PROGRAM = (
    f"""
import contextlib, os, signal, sys, time, warnings
sys.path.insert(0, {str(Path(__file__).parent.parent / "support")!r})
import torch
import memo
from small_models import *
"""
    + """
pwrite = os.pwrite
def slow(*arguments):  # so that some are in flight at each fork
    time.sleep(0.02)
    return pwrite(*arguments)
os.pwrite = slow
torch.set_num_threads(1)  # a fork has no threads of OpenMP's either
def forked(work):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    signal.alarm(20)  # a wait without end
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            work()
            print("trained", flush=True)
        except memo.MemoError as error:
            print(error, flush=True)
        for one in told:
            print(one.message, flush=True)
    sys.exit(0)
def alone():
    assert_equal(train(model, forward), plain())
def forward(step):
    with contextlib.nullcontext() if sys.argv[2] == "attached" else manager:
        return model(ids(step))
model = stack()
tier = {"host": dict(host="8MiB"), "disk": dict(disk=sys.argv[1])}[sys.argv[3]]
manager = memo.offload(model, alpha=float(sys.argv[4]), min_bytes=512, trace=sys.argv[1] + "/trace.jsonl", **tier)
if sys.argv[2] == "attached":
    manager.attach()
"""
)

UNMANAGED = "this process was forked from the one that manages Stack, and manages no forward of it"
REFUSED = "this process was forked from the one whose forward saved these tensors, and has none of its threads"

BETWEEN = """
forward(0).backward()
model.zero_grad()
forked(alone)
"""
BEFORE_BACKWARD = """
loss = forward(0)
forked(loss.backward)
loss.backward()
model.zero_grad()
"""
WITHIN = """
def fork(*arguments):
    hook.remove()
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        signal.alarm(20)
        children.append(child)
children = []
hook = model.layers[1].norm2.register_forward_pre_hook(fork)
try:
    forward(0).backward()
except memo.MemoError as error:
    assert children
    print(error, flush=True)
    warnings.simplefilter("ignore")
    model.zero_grad()
    alone()
if children:
    sys.exit(0)
model.zero_grad()
"""

END = """
assert_equal(train(model, forward), plain())
manager.close()
with open(sys.argv[1] + "/trace.jsonl") as trace:
    assert sum('"k":"end"' in line for line in trace) == 1
print("parent")
"""


@pytest.mark.parametrize("alpha", ["1.0", "0.0"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("how", ["attached", "entered"])
@pytest.mark.parametrize(
    ("when", "told"),
    [(BETWEEN, UNMANAGED), (BEFORE_BACKWARD, REFUSED), (WITHIN, REFUSED)],
    ids=["between", "before_backward", "within"],
)
def test_a_forked_child_trains_or_is_refused(
    when: str, told: str, how: str, tier: str, alpha: str, tmp_path: Path
) -> None:
    result = ready_python.run("-c", PROGRAM + when + END, tmp_path, how, tier, alpha, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "parent"
    assert sum(told in line for line in lines) == 1
    if told == UNMANAGED:
        assert lines[0] == "trained"
