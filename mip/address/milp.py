"""Mixed-integer program of address planning, in MEMO's letters (SIGMOD 2025), for either level of the bi-level form.

Level 1 is this program for the buffers of one layer's forward or backward pass; level 2 is the same program for the
step with each pass as one pseudo-buffer (`memo.mip.address.bilevel`). All numbers are units of the greatest common
divisor: in bytes solvers call feasible programs infeasible. The solver's answer is not trusted: its addresses only
give an order, in which the buffers are packed again in whole units, and its claim of optimality counts only when the
result is as small as claimed.
"""

from __future__ import annotations

import math
import time

from memo.mip.address.instance import Instance
from memo.mip.address.portfolio import ArenaSolver
from memo.mip.solvers import pulp, solve_model

MAX_PAIRS = 6000
"""Overlapping pairs, one binary variable each, beyond which the solver makes no progress within a minute."""


class AddressModel:
    """The program: minimise M, for every tensor i and every pair (i, j) of tensors with overlapping lifetimes.

    (1)  A_i + S_i <= M                          every tensor ends below the peak
    (2)  A_i + S_i <= A_j + (1 - z_ij) * L       z_ij = 1: i lies below j
    (3)  A_j + S_j <= A_i + z_ij * L             z_ij = 0: j lies below i
    (4)  LB <= M <= UB,  A_i >= 0,  z_ij in {0, 1}

    with S_i the sizes, A_i the addresses, L an upper bound of every address; (n) are the numbers of this list.

    Args:
        instance: the buffers, in units.
        lower: LB.
        incumbent: offsets of a known placement: the warm start, and its height is UB and L.
    """

    def __init__(self, instance: Instance, *, lower: int, incumbent: tuple[int, ...]) -> None:
        sizes, upper = instance.sizes, instance.height(incumbent)
        self.program = pulp.LpProblem("address_plan", pulp.LpMinimize)
        self.M = self.program.add_variable("M", lower, upper)  # (4)
        multiples = []
        self.A = []
        for i, alignment in enumerate(instance.alignments):
            # A is a whole multiple of the alignment. Without one, whole sizes make A whole by themselves.
            whole = pulp.LpContinuous if alignment == 1 else pulp.LpInteger
            multiples.append(self.program.add_variable(f"a_{i}", 0, (upper - sizes[i]) // alignment, cat=whole))
            self.A.append(pulp.LpAffineExpression({multiples[i]: alignment}))
        self.program += self.M
        for i, size in enumerate(sizes):
            # (1)
            self.program += self.A[i] + size <= self.M
        for i, j in overlapping_pairs(instance):
            z = self.program.add_variable(f"z_{i}_{j}", cat=pulp.LpBinary)
            self.program += self.A[i] + sizes[i] <= self.A[j] + (1 - z) * upper  # (2)
            self.program += self.A[j] + sizes[j] <= self.A[i] + z * upper  # (3)
            z.setInitialValue(int(incumbent[i] < incumbent[j]))
        self.M.setInitialValue(upper)
        for i, at in enumerate(incumbent):
            multiples[i].setInitialValue(at // instance.alignments[i])

    def addresses(self) -> list[float]:
        """Values of A after solving."""
        return [float(pulp.value(address)) for address in self.A]


def solve_flat(solver: ArenaSolver, *, deadline: float) -> None:
    """Runs the portfolio and, if that misses the lower bound, solves the program with its result as warm start.

    Raises:
        SolverFailed: the solver crashed; the incumbent stays.
    """
    instance = solver.instance
    if solver.impossible:
        return
    solver.portfolio(deadline=deadline)
    if solver.optimal or not solver.offsets or len(overlapping_pairs(instance, most=MAX_PAIRS)) > MAX_PAIRS:
        return
    model = AddressModel(instance, lower=solver.lower, incumbent=solver.offsets)
    solved = solve_model(model.program, time_limit_s=deadline - time.monotonic())
    if not solved.found:
        return
    addresses = model.addresses()
    solver.follow(sorted(range(instance.n), key=lambda i: (addresses[i], i)), "HiGHS model", deadline=math.inf)
    claimed = round(float(model.M.varValue))
    if solved.proven and solver.upper == claimed:
        solver.lower = max(solver.lower, claimed)


def overlapping_pairs(instance: Instance, *, most: int | None = None) -> list[tuple[int, int]]:
    """Every pair of buffers that share a section, sorted; with `most`, stops once there are more than that."""
    pairs: set[tuple[int, int]] = set()
    inside: list[list[int]] = [[] for _ in range(instance.n_sections)]
    for index, span in enumerate(instance.spans):
        for section in range(*span):
            inside[section].append(index)
    for live in inside:
        for k, i in enumerate(live):
            pairs.update((i, j) for j in live[k + 1 :])
            if most is not None and len(pairs) > most:
                return sorted(pairs)
    return sorted(pairs)
