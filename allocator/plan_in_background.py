"""Plans a step's addresses in a process of its own, so that training goes on meanwhile.

`Planning` starts this module on a problem and picks up its plan later; problem and plan go through
anonymous temporary files in the formats of docs/plan-format.md. The child imports no torch, and one solver only. A plan is
checked before it is handed over, here and not in the child.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO

import memo.errors
from memo.errors import MemoError, SolverFailed
from memo.mip import STDIN
from memo.mip.address import (
    Method,
    Plan,
    Problem,
    plan_to_json,
    problem_to_json,
    read_plan,
    read_problem,
    require_valid,
    solve,
)

__all__ = ["Planning"]

_MEMO = str(Path(memo.errors.__file__).parent.parent)
# Memo's own folder comes last: it is found where it is not installed, and shadows nothing.
_START = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("memo.allocator.plan_in_background", run_name="__main__", alter_sys=True)
"""
_NICENESS = 10  # training goes first
_GAP = 0.005  # of the lower bound; half of what an arena may be above it


class Planning:
    """A plan in the making."""

    def __init__(self, problem: Problem, *, time_limit_s: float) -> None:
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _stop
        with tempfile.TemporaryFile() as question:
            question.write(problem_to_json(problem).encode())
            question.seek(0)
            # -P: the user's directory must not come before the packages that are installed.
            command = [sys.executable, "-P", "-c", _START, _MEMO, "--time-limit", str(time_limit_s)]
            self._process = subprocess.Popen(
                command, stdin=question, stdout=self._answer, stderr=subprocess.PIPE, start_new_session=True
            )
        self._problem = problem
        self._end = weakref.finalize(self, _stop, self._process, self._answer)

    def done(self) -> bool:
        """True once `result` will not wait."""
        return self._process.poll() is not None

    def result(self) -> Plan:
        """The plan; waits for it.

        Raises:
            SolverFailed: the process ended without one.
            PlanInvalid: what it wrote is no plan for the problem.
        """
        _, stderr = self._process.communicate()
        try:
            if self._process.returncode != 0:
                lines = (stderr or b"").decode(errors="replace").strip().splitlines()
                raise SolverFailed(f"the background planner ended with {self._process.returncode}: {lines[-1:]}")
            plan = read_plan(f"/dev/fd/{self._answer.fileno()}")
            if plan.problem != self._problem:
                raise SolverFailed("the background planner answered another question")
            require_valid(plan)
            return plan
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the process if it still runs. Idempotent."""
        self._end()


def _stop(process: subprocess.Popen[bytes], answer: IO[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
    answer.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="memo.allocator.plan_in_background")
    parser.add_argument("--time-limit", type=float, required=True)
    arguments = parser.parse_args()
    os.nice(_NICENESS)
    try:
        problem = read_problem(STDIN)
        plan = solve(problem, time_limit_s=arguments.time_limit, gap=_GAP, method=Method.SEARCH)
    except MemoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.stdout.write(plan_to_json(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
