"""A stop request: the first signal asks for it, the second ends the run, also while the main thread runs no Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from memo.gpt.train.interrupt import StopRequest
from memo.threads import signals_told

IN_A_C_CALL = """
import contextlib, ctypes, sys, threading
from memo.gpt.train import interrupt
interrupt.GRACE_S, interrupt.TOGETHER_S = 0.1, 0.0
locks = threading.Event()
def say():
    locks.wait()
    print("locked", flush=True)
with {outer}, interrupt.StopRequest(lost="all is lost", {more}).listening():
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    threading.Thread(target=say, daemon=True).start()
    sys.setswitchinterval(1000)  # the thread runs again once the call below gives the interpreter up
    locks.set()
    lock(mutex)  # waits for ever, in no bytecode
"""
STOPPING = "memo train: stopping after this step; interrupt again to stop at once\n"


def ended_in_a_c_call(
    *signals: signal.Signals, outer: str = "contextlib.nullcontext()", more: str = ""
) -> tuple[int, str]:
    """Exit code and last words of a process that gets the signals within a call that does not return."""
    command = [sys.executable, "-c", IN_A_C_CALL.format(outer=outer, more=more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "locked\n"
            process.send_signal(signals[0])
            assert process.stderr.readline() == STOPPING
            for number in signals[1:]:
                process.send_signal(number)
            return process.wait(60), process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_a_long_c_call_are_answered_at_once(second: signal.Signals) -> None:
    assert ended_in_a_c_call(signal.SIGINT, second) == (130, "memo train: interrupted; all is lost\n")


def test_two_signals_at_once_are_one_request() -> None:
    """As timeout and wrappers of commands send them; Python calls the handler once for both."""
    source = (
        "import ctypes, os, signal, threading, time\n"
        "from memo.gpt.train import interrupt\n"
        "interrupt.GRACE_S = 0.1\n"
        "stop, libc, mutex = interrupt.StopRequest(lost='all'), ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "def signals():\n"
        "    time.sleep(0.5)\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.05)\n"
        "    time.sleep(0.5)\n"
        "    libc.pthread_mutex_unlock(mutex)\n"
        "with stop.listening():\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    threading.Thread(target=signals).start()\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "print('saved', bool(stop))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved True\n", STOPPING)


def test_a_rank_within_a_collective_ends_by_sigterm_alone() -> None:
    outer = "__import__('memo.parallel').parallel.ended_by_signal(0.1)"
    code, said = ended_in_a_c_call(signal.SIGINT, signal.SIGINT, signal.SIGTERM, outer=outer, more="forwarded=True")
    assert (code, said) == (143, "memo train: still waiting for another rank long after SIGTERM; ending\n")


def test_the_second_signal_raises_and_says_what_is_lost() -> None:
    stop = StopRequest(lost="all is lost")
    former = signal.getsignal(signal.SIGINT)
    with stop.listening():
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt, match="all is lost"):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is former
    assert signal.set_wakeup_fd(-1) == -1


def test_a_launcher_s_signal_after_the_terminal_s_is_the_same_request() -> None:
    with StopRequest(forwarded=True, lost="").listening():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_an_outer_block_hears_of_the_signals_of_an_inner_one() -> None:
    heard = {"outer": threading.Event(), "inner": threading.Event()}
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with signals_told(lambda *_: heard["outer"].set()), signals_told(lambda *_: heard["inner"].set()):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert all(one.wait(60) for one in heard.values())
    finally:
        signal.signal(signal.SIGUSR1, before)
