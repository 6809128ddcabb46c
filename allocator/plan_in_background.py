"""Background planner: solves an address problem in a child process while training continues.

`Planning` starts this module as the child and reads its plan later. Problem and plan are passed through anonymous
temporary files in the formats of docs/plan-format.md. The child imports no torch, and one solver only. The parent, not
the child, checks the plan before it is used.
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
    AddressPlan,
    AddressProblem,
    Method,
    plan_to_json,
    problem_to_json,
    read_plan,
    read_problem,
    require_valid,
    solve,
)

_MEMO = str(Path(memo.errors.__file__).parent.parent)
# The package's parent folder is last on the path: found where memo is not installed, and shadowing nothing.
_START = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("memo.allocator.plan_in_background", run_name="__main__", alter_sys=True)
"""
_NICENESS = 10  # training has priority
_GAP = 0.005  # relative to the lower bound; half of the 1 % that an arena may be above it


class Planning:
    """Running planner process.

    Args:
        problem: The address problem.
        time_limit_s: Time limit of the solver.
    """

    def __init__(self, problem: AddressProblem, *, time_limit_s: float) -> None:
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _stop
        with tempfile.TemporaryFile() as question:
            question.write(problem_to_json(problem).encode())
            question.seek(0)
            # -P: keeps the user's directory off the path, where it would precede installed packages.
            command = [sys.executable, "-P", "-c", _START, _MEMO, "--time-limit", str(time_limit_s)]
            self._process = subprocess.Popen(
                command, stdin=question, stdout=self._answer, stderr=subprocess.PIPE, start_new_session=True
            )
        self._problem = problem
        self._end = weakref.finalize(self, _stop, self._process, self._answer)

    def done(self) -> bool:
        """Returns True once `result` will not block."""
        return self._process.poll() is not None

    def result(self) -> AddressPlan:
        """Waits for the plan, checks and returns it.

        Raises:
            SolverFailed: The process ended without a plan, or solved another problem.
            PlanInvalid: The plan breaks a rule.
        """
        _, stderr = self._process.communicate()
        try:
            if self._process.returncode != 0:
                lines = (stderr or b"").decode(errors="replace").strip().splitlines()
                raise SolverFailed(f"the background planner ended with {self._process.returncode}: {lines[-1:]}")
            plan = read_plan(f"/dev/fd/{self._answer.fileno()}")
            if plan.problem != self._problem:
                raise SolverFailed("the background planner returned a plan for another problem")
            require_valid(plan)
            return plan
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Kills the process if it still runs. Idempotent."""
        self._end()


def _stop(process: subprocess.Popen[bytes], answer: IO[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
    answer.close()


def main() -> int:
    """Entry point of the child: reads a problem from stdin, writes its plan to stdout."""
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
