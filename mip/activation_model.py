"""The linear program of activation planning, over groups of like layers.

For a layer i of stage s: x_l the fraction of its tokens at level l, h and d the bytes that go to host and disk. Bytes are
in units of the largest layer's, times in units of the mean layer's, so that the solver's tolerances mean something.

    minimise  sum_s T_s  +  (M - 1) T  +  small prices that settle ties

    (1)  sum_l x_l = 1                                       levels
    (2)  S = fixed + sum_l x_l saved_l;  K = S - h - d >= 0  what is saved, what of it is kept
    (3)  T >= T_s = C + sum R + sum stalls                   the first microbatch visits all, the slowest sets the pace
    (4)  out_i >= (h + d) / d2h - F(i+1),  d / write + h w - F(i+1)
    (5)  in_i  >= (h + d) / h2d - B(i+1) - R(i+1),  d / read + h w' - B(i+1) - R(i+1)
         w: what a byte of host's holds up one of the disk's on the link (memo.mip.activation_cost.disk_delay)
    (6)  resident(p) + (flight - 1) sum K + sum_{j < behind(p)} K_j + sum_{j whole at p} G_j <= device
         at each position p of a stage, with G = sum_l x_l beside_l; and full(n) + G(n) - K(n) more where flight > 1
    (7)  sum over a node of flight (sum h) <= host - rounding;  likewise d <= disk - rounding
    (8)  sum over a node of M (sum d) <= wear a day / 86400 s * M (C + sum R) of each of its stages
    (9)  h = d = 0 for a stage's last layer
   (10)  h = d = 0 for the last few and K = 0 for all others: only where no layer is to be divided

MEMO's two inequalities (SIGMOD 2025, section 4.1) are (4) with out_i = 0 and (7), with x_all its alpha. There are no
integers: fractions of tokens are rounded to tiles afterwards, downwards, which no row objects to; and a tier may hold any
part of a layer's storages. Where a stage's layers are of one class most of them share their variables (`Sharing`).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

import pulp

from memo.errors import SolverFailed
from memo.mip.activation import ActivationProblem, LayerPlan, stage_layers
from memo.mip.activation_cost import device_positions, disk_delay, rounding_bytes, stage_compute_s
from memo.mip.highs import Backend, solve_model
from memo.mip.profile import LayerProfile, Level

__all__ = ["DAY_S", "Limit", "Model", "Resource", "Sharing"]

DAY_S = 86400.0
TIME_LIMIT_S = 60.0

MARGIN = 1e-6
"""Of the largest layer's bytes: the solver takes rows that are broken by a tenth of this for kept, and budgets are hard."""

# What breaks ties: a byte moved costs a ten-thousandth of its copy's time, on disk twice that, so what may as well stay
# stays.
MOVING_PRICE, DISK_PRICE = 1e-4, 2e-4


class Resource(enum.StrEnum):
    """What a row of the model shares out."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    WEAR = "disk wear"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"


class Sharing(enum.Enum):
    """Which layers of a stage share their variables, where all its layers are of one class."""

    UNIFORM = "all but the last two"
    INTERIOR = "all but the first and the last three"
    """Loses nothing, or next to nothing where recomputes are given what autograd does not save: the earlier a layer, the
    more room there is for that. May treat the first and the third last otherwise for no gain."""
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A row that a solution meets exactly."""

    resource: Resource
    where: str
    saving: float
    """Seconds that a step would win for each further byte (device, host, disk, wear a day), or second of a window."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Group:
    """Layers of one stage that share variables."""

    stage: int
    layer: LayerProfile
    members: list[int]
    """Positions within the stage."""
    x: dict[Level, pulp.LpVariable]
    host: pulp.LpVariable | int
    disk: pulp.LpVariable | int
    saved: pulp.LpAffineExpression
    recompute: pulp.LpAffineExpression
    beside: pulp.LpAffineExpression
    """G: what its recompute is given and autograd does not save."""

    @property
    def kept(self) -> pulp.LpAffineExpression:
        return self.saved - self.host - self.disk


class Model:
    """One problem's program. `relaxed`: that tier's budget may be exceeded, and by how much is all that is minimised.

    `staying`: so many layers at the end of each stage stay whole and all others move whole, so that rounding takes less of
    the tiers; None: any part of any layer may stay.
    """

    def __init__(
        self,
        problem: ActivationProblem,
        *,
        sharing: Sharing = Sharing.INTERIOR,
        staying: int | None = None,
        relaxed: Resource | None = None,
    ) -> None:
        self.problem = problem
        self.staying = staying
        self._sharing = sharing
        self._rates = problem.hardware.lanes(problem.budgets.ranks_per_node)
        layers = problem.profile.layer_profiles()
        self._byte = float(max(max(layer.full_bytes for layer in layers), 1))
        stages = range(problem.pipeline.stages)
        self._compute = [stage_compute_s(problem, stage) for stage in stages]
        self._second = sum(self._compute) / len(layers) or 1.0
        self.solved = False
        self._program = pulp.LpProblem("activation_plan", pulp.LpMinimize)
        self._limits: list[tuple[pulp.LpConstraint, Resource, str, float]] = []
        self._excess = pulp.LpVariable("excess", 0, None) if relaxed else None
        self._relaxed = relaxed
        self._prices = pulp.LpAffineExpression()
        self._pace = pulp.LpVariable("T", 0, None)
        self._total = pulp.LpAffineExpression()  # sum_s T_s
        self._stages = [self._groups(stage) for stage in stages]
        for stage in stages:
            self._time_rows(stage)
            self._device_rows(stage)
        for first in range(0, problem.pipeline.stages, problem.pipeline.stages_per_node):
            self._node_rows(range(first, first + problem.pipeline.stages_per_node))
        step = self._total + (problem.pipeline.microbatches - 1) * self._pace
        self._program += step + self._prices if self._excess is None else self._excess

    def solve(self) -> bool:
        """Whether there is a solution; it can be read afterwards.

        Raises:
            SolverFailed: the solver crashed, or ran out of time.
        """
        solved = solve_model(self._program, backend=Backend.HIGHS, time_limit_s=TIME_LIMIT_S)
        if not solved.proven:
            raise SolverFailed(f"no answer to the activation plan's program in {TIME_LIMIT_S:.0f} s")
        self.solved = solved.found
        return self.solved

    @property
    def shares(self) -> bool:
        """Whether there are layers that share variables."""
        return any(len(group.members) > 1 for groups in self._stages for group in groups)

    @property
    def step_s(self) -> float:
        """The solution's, before any rounding."""
        pace = (self.problem.pipeline.microbatches - 1) * float(self._pace.varValue or 0.0)
        return (float(pulp.value(self._total)) + pace) * self._second

    @property
    def excess_bytes(self) -> float:
        """By how much the relaxed tier is too small; for wear, bytes a day."""
        assert self._excess is not None
        return float(self._excess.varValue or 0.0) * self._byte

    def layer_plans(self) -> list[LayerPlan]:
        """The solution, one plan for each layer of the profile, as exact fractions."""
        plans = [LayerPlan()] * len(self.problem.profile.layers)
        for stage, groups in enumerate(self._stages):
            first = stage_layers(self.problem, stage).start
            for group in groups:
                plan = self._layer_plan(group)
                for member in group.members:
                    plans[first + member] = plan
        return plans

    def limits(self) -> list[Limit]:
        """The rows that keep the step from being shorter, the one that is worth most first."""
        found = []
        for row, resource, where, unit in self._limits:
            price = -float(row.pi or 0.0)
            if price > 1e-9:
                found.append(Limit(resource=resource, where=where, saving=price * self._second / unit))
        return found

    # Variables.

    def _groups(self, stage: int) -> list[_Group]:
        layers = self.problem.profile.layer_profiles()
        mine = [layers[index] for index in stage_layers(self.problem, stage)]
        first, last = {Sharing.UNIFORM: (0, 2), Sharing.INTERIOR: (1, 3), Sharing.NONE: (0, len(mine))}[self._sharing]
        alike = len(mine) > first + last and len({layer.name for layer in mine}) == 1
        shared = range(first, len(mine) - last) if alike else range(0)
        members = [[number] for number in range(len(mine)) if number not in shared]
        if shared:
            members.insert(first, list(shared))
        return [self._group(stage, mine, numbers) for numbers in members]

    def _group(self, stage: int, mine: Sequence[LayerProfile], members: list[int]) -> _Group:
        layer, name = mine[members[0]], f"{stage}_{members[0]}"
        x = {known.level: pulp.LpVariable(f"x_{known.level}_{name}", 0, 1) for known in layer.levels}
        self._program += pulp.lpSum(x.values()) == 1  # (1)
        budgets, rates = self.problem.budgets, self._rates
        moves = members[-1] < len(mine) - (self.staying or 1)
        link = moves and rates.d2h_bytes_per_s > 0 and rates.h2d_bytes_per_s > 0  # (9)
        drive = link and rates.disk_write_bytes_per_s > 0 and rates.disk_read_bytes_per_s > 0
        to_host = link and (budgets.host_bytes or self._relaxed is Resource.HOST)
        to_disk = drive and (budgets.disk_bytes or self._relaxed is Resource.DISK)
        group = _Group(
            stage=stage,
            layer=layer,
            members=members,
            x=x,
            host=pulp.LpVariable(f"h_{name}", 0, None) if to_host else 0,
            disk=pulp.LpVariable(f"d_{name}", 0, None) if to_disk else 0,
            saved=pulp.lpSum(
                [layer.fixed_bytes / self._byte]
                + [x[known.level] * (known.saved_bytes / self._byte) for known in layer.levels]
            ),
            recompute=pulp.lpSum(x[known.level] * (known.recompute_s / self._second) for known in layer.levels),
            beside=pulp.lpSum(
                x[known.level] * (known.beside_bytes / self._byte) for known in layer.levels if known.beside_bytes
            ),
        )
        if to_host or to_disk:
            self._program += group.kept >= 0  # (2)
        if self.staying is not None and moves:
            self._program += group.kept == 0  # (10)
        return group

    # Rows.

    def _time_rows(self, stage: int) -> None:
        groups = self._stages[stage]
        group_of = {member: group for group in groups for member in group.members}
        pairs = collections.Counter(
            (id(group_of[number]), id(group_of[number + 1])) for number in range(len(group_of) - 1)
        )
        by_id = {id(group): group for group in groups}
        total = (
            pulp.lpSum(len(group.members) * group.recompute for group in groups) + self._compute[stage] / self._second
        )
        for (this, following), count in pairs.items():
            moving, window = by_id[this], by_id[following]
            if isinstance(moving.host, int) and isinstance(moving.disk, int):
                continue
            total += count * (self._copy_out(moving, window) + self._copy_in(moving, window))
        self._total += total
        if self.problem.pipeline.microbatches > 1:
            self._program += self._pace >= total  # (3)

    def _copy_out(self, moving: _Group, window: _Group) -> pulp.LpVariable:
        """(4)"""
        rates = self._rates
        moved = self._seconds(rates.d2h_bytes_per_s)
        self._prices += len(moving.members) * moved * (MOVING_PRICE * moving.host + DISK_PRICE * moving.disk)
        forward = window.layer.forward_s / self._second
        return self._copy(moving, rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s, forward, Resource.COPY_OUT)

    def _copy_in(self, moving: _Group, window: _Group) -> pulp.LpVariable:
        """(5)"""
        rates = self._rates
        backward = window.layer.backward_s / self._second + window.recompute
        return self._copy(moving, rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s, backward, Resource.COPY_IN)

    def _copy(
        self, moving: _Group, link: float, disk: float, window: pulp.LpAffineExpression | float, resource: Resource
    ) -> pulp.LpVariable:
        """The stall of one copy, with a row for the link and one for the disk."""
        way = "forward" if resource is Resource.COPY_OUT else "backward"
        stall = pulp.LpVariable(f"{way}_{moving.stage}_{moving.members[-1]}", 0, None)
        row = stall >= (moving.host + moving.disk) * self._seconds(link) - window
        self._add(row, resource, f"the link's window in {way}", unit=self._second)
        if not isinstance(moving.disk, int):
            by_disk = moving.disk * self._seconds(min(link, disk))
            held_up = moving.host * (disk_delay(link, disk) * self._byte / self._second)
            row = stall >= by_disk + held_up - window
            self._add(row, resource, f"the disk's window in {way}", unit=self._second)
        return stall

    def _device_rows(self, stage: int) -> None:
        groups = self._stages[stage]
        flight = self.problem.pipeline.in_flight(stage)
        elsewhere = (flight - 1) * pulp.lpSum(len(group.members) * group.kept for group in groups)
        if flight > 1:
            last = groups[-1]  # the last layer
            elsewhere += last.layer.full_bytes / self._byte + last.beside - last.kept
        device = self.problem.budgets.device_bytes
        tightest: dict[tuple[int, ...], float] = {}
        # From the last backwards: a row with fewer kept layers and no less room than a later one says nothing new, where
        # what stands beside the whole layers is the same.
        for position in sorted(device_positions(self.problem, stage), key=lambda p: (-p.behind, -p.resident_bytes)):
            room = (device - position.resident_bytes) / self._byte
            whole = range(position.behind, position.behind + position.whole)
            counts = [sum(member in whole for member in group.members) if group.beside else 0 for group in groups]
            if room >= tightest.get(tuple(counts), float("inf")):
                continue
            tightest[tuple(counts)] = room
            behind = pulp.lpSum(
                sum(member < position.behind for member in group.members) * group.kept for group in groups
            )
            beside = pulp.lpSum(count * group.beside for count, group in zip(counts, groups, strict=True) if count)
            self._budget(elsewhere + behind + beside, room, Resource.DEVICE, f"at {position.name}")  # (6)

    def _node_rows(self, stages: range) -> None:
        problem, budgets = self.problem, self.problem.budgets
        ranks = budgets.ranks_per_node // len(stages)
        host, disk, written = pulp.LpAffineExpression(), pulp.LpAffineExpression(), pulp.LpAffineExpression()
        for stage in stages:
            flight = problem.pipeline.in_flight(stage)
            for group in self._stages[stage]:
                count = ranks * len(group.members)
                host += count * flight * group.host
                disk += count * flight * group.disk
                written += count * problem.pipeline.microbatches * group.disk
        rounding = ranks * sum(rounding_bytes(problem, stage, divided=self.staying is None) for stage in stages)
        for used, budget, tier in (
            (host, budgets.host_bytes, Resource.HOST),
            (disk, budgets.disk_bytes, Resource.DISK),
        ):
            room = budget - rounding if tier is self._relaxed else max(0, budget - rounding)
            self._budget(used, room / self._byte, tier, "of the node")  # (7)
        if budgets.disk_wear_bytes_per_day is None or not written:
            return
        per_second = budgets.disk_wear_bytes_per_day / DAY_S / self._byte * self._second
        for stage in stages:
            busy = self._compute[stage] / self._second + pulp.lpSum(
                len(group.members) * group.recompute for group in self._stages[stage]
            )
            least = per_second * problem.pipeline.microbatches * self._compute[stage] / self._second
            row = written <= per_second * problem.pipeline.microbatches * busy - min(MARGIN, least)  # (8)
            self._add(row, Resource.WEAR, "of the node", unit=self._byte * DAY_S)

    def _budget(self, used: pulp.LpAffineExpression, room: float, resource: Resource, where: str) -> None:
        if self._relaxed is resource and self._excess is not None:
            used, room = used - self._excess, room - MARGIN  # a budget larger by the excess then has its margin
        else:
            room = max(room - MARGIN, min(room, 0.0))
        if used or room < 0:
            self._add(pulp.lpSum([used]) <= room, resource, where, unit=self._byte)

    def _add(self, row: pulp.LpConstraint, resource: Resource, where: str, *, unit: float) -> None:
        self._program += row
        self._limits.append((row, resource, where, unit))

    def _seconds(self, bytes_per_s: float) -> float:
        """Time units for one byte unit."""
        return self._byte / bytes_per_s / self._second

    def _layer_plan(self, group: _Group) -> LayerPlan:
        x = {level: min(max(float(variable.varValue or 0.0), 0.0), 1.0) for level, variable in group.x.items()}
        rest = 1.0 - x.get(Level.MATMULS, 0.0) - x.get(Level.ATTENTION, 0.0)
        saved = float(pulp.value(group.saved))
        host, disk = (max(float(pulp.value(part) or 0.0), 0.0) for part in (group.host, group.disk))
        host, disk = (part if part > MARGIN else 0.0 for part in (host, disk))
        if saved - host - disk < MARGIN and host + disk > 0.0:
            saved = host + disk
        return LayerPlan(
            all_tokens=max(rest, 0.0),
            matmul_tokens=x.get(Level.MATMULS, 0.0),
            attention_tokens=x.get(Level.ATTENTION, 0.0),
            kept=max(saved - host - disk, 0.0) / saved if saved else 1.0,
            host=host / saved if saved else 0.0,
            disk=disk / saved if saved else 0.0,
        )
