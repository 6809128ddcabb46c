"""Linear program of activation planning, over groups of equal layers.

For a layer i of stage s: x_p is its fraction at point p of its class, h and d are the bytes that go to host and disk.
Bytes are in units of the largest layer's, times in units of the mean layer's, to suit the solver's tolerances.

    minimise  sum_s T_s  +  (M - 1) T  +  small prices that break ties

    (1)  sum_p x_p = 1                                       points
    (2)  S = fixed + sum_p x_p saved_p;  K = S - h - d >= 0  what is saved, what of it is kept
    (3)  T >= T_s = C + sum R + sum stalls                   the first microbatch visits all, each further one takes
                                                             as long as the slowest, stage or message
    (4)  out_i >= (h + d) / d2h - W(i+1),  d / write + h w - W(i+1)
    (5)  in_i  >= (h + d) / h2d - W'(i+1),  d / read + h w' - W'(i+1)
         with the windows W = F + e and W' = B + R + e': a layer's work and what collectives last beyond it
         (memo.mip.activation.network_load), e >= load - F, e' >= load' - B - R; these e are part of T_s, too
         w: delay of disk bytes by a host byte on the link (memo.mip.activation.cost.disk_delay)
         with several chunks, and with split backwards, memo.mip.activation.overlap_windows gives the pairs i and i+1
    (6)  resident(q) + sum_j kept(q, j) K_j + whole(q, j) G_j + saved(q, j) (S_j - least_j)
         + unmoved(q, j) (full_j + G_j - h_j - d_j) + recomputing(q, j) H_j + absent(q, j) A_j <= device
         at each position q of a stage (memo.mip.activation.memory_peaks), with G = sum_p x_p beside_p and
         H = sum_p x_p held_p, where held_p is at least a forward's transient beyond backward's, and A = sum_p x_p absent_p;
         least_j, the S of its last point, is in resident(q). Under 1F1B kept is (flight - 1) for each layer, 1 more where
         j < behind(q); whole is 1 for the running layer, saved is 1 for the one before it, absent is -1 for one in backward.
         Without integers these rows join the program as solutions break them: few of the many bind
    (7)  sum over a node of flight (sum h) <= host - rounding;  likewise d <= disk - rounding; of several chunks H_s
         instead, with H_s >= sum over the chunks of as many as are held at one time (sum h), for each such time
    (8)  sum over a node of M (sum d) <= wear a day / 86400 s * M (C + sum R) of each of its stages
    (9)  h = d = 0 for a stage's last layer
   (10)  h = d = 0 for the last few and K = 0 for all others: only where no layer's bytes are to be divided
   (11)  D_k >= D_(k-1) - W'_k - in_k + load'_k + sync_k,  D_k >= sync_k for the steps k of the first stage's last pass;
         the step takes the last D longer: gradients that are reduced once a step, and are not behind that pass
  (12)  with a codec h and d have two parts each, of bytes that move as codes and of others: the first ones
        <= x_all S_all together, the others <= S - x_all S_all. In (4), (5), (7) and (8) h and d are bytes of codes then, and
        W and T have the seconds of coding the first ones

Of these, MEMO (SIGMOD 2025, section 4.1) has two inequalities: (4) with out_i = 0, and (7), with x_all its alpha. The
numbers are of this list, not of the paper's equations. A tier may hold any part of a layer's storages. Each layer of a
plan is at one point: x is given (`Model.at`) or binary (`whole`); without either x are fractions, which give a lower
bound on the step (memo.mip.activation.whole_points). Only `whole` brings integers. Where a stage's layers are of one
class most of them share their variables (`Sharing`).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from memo.errors import SolverFailed
from memo.mip.activation.cost import disk_delay, rounding_bytes
from memo.mip.activation.layer_groups import MARGIN, DeviceRows, LayerGroup, Moved, Sharing, WeightedSum, members_of
from memo.mip.activation.memory_peaks import grouped_peak_candidates
from memo.mip.activation.network_load import pass_loads, sync_load
from memo.mip.activation.overlap_windows import Window, copies_in, copies_out
from memo.mip.activation.plan import ActivationProblem, LayerPlan
from memo.mip.activation.stage_view import StageView
from memo.mip.inputs.pipeline_schedules import Pass
from memo.mip.inputs.profile import ALL, LayerProfile, PointProfile
from memo.mip.solvers import pulp, solve_fixed, solve_model

DAY_S = 86400.0
TIME_LIMIT_S, WHOLE_TIME_LIMIT_S = 60.0, 10.0
"""Time limits of programs without and with integers; of the latter, what was found by then is taken."""
WHOLE_GAP = 0.01
"""Part of the objective by which a program with integers may miss its optimum."""

T = TypeVar("T")

# Prices that break ties: a moved byte costs a ten-thousandth of its copy's time, on disk twice that, so that bytes stay
# where moving them gains nothing.
MOVING_PRICE, DISK_PRICE = 1e-4, 2e-4


class Resource(enum.StrEnum):
    """A resource that a row of the program shares out."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    WEAR = "disk wear"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"
    NETWORK = "network"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A binding row of a solution."""

    resource: Resource
    where: str
    saving: float
    """Dual value: seconds of a step per further byte (device, host, disk, wear a day), or per second of a window."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Solution of a program in which each layer is at a given point."""

    points: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    """Plan of each layer of the profile."""
    objective: float
    """Seconds of a step, or bytes of the excess over the relaxed tier."""
    step_s: float
    limits: tuple[Limit, ...]
    """Binding rows, as of `Model.limits`."""
    changes: Sequence[Mapping[str, float]]
    """Bounds from below of the change of the objective, if one layer were at another point, in units of the program. By
    layer and name of the point. The objective is convex in the fractions of the points, so that reduced costs are such
    bounds, and their sum is where several layers change."""


class PlanModel:
    """The program of one problem.

    Args:
        problem: profile, hardware, budgets and pipeline.
        sharing: layers that share their variables.
        staying: so many layers at the end of each stage stay whole and all others move whole, so that rounding takes
            less of the tiers; None: any part of any layer may stay.
        relaxed: the tier whose budget may be exceeded; the excess is then the objective.
        whole: each layer is at one point, and no layers share.
        bound: the step is below that of any plan: rounding takes nothing of the tiers, and of a pipeline M T is minimised
            instead of (3), which chunks and split backwards may undercut, for the two stages that are likely the slowest.
    """

    def __init__(
        self,
        problem: ActivationProblem,
        *,
        sharing: Sharing = Sharing.INTERIOR,
        staying: int | None = None,
        relaxed: Resource | None = None,
        whole: bool = False,
        bound: bool = False,
    ) -> None:
        self.problem = problem
        self.staying = staying
        self._bound = bound
        self._whole, self._sharing = whole, Sharing.NONE if whole else sharing
        self._rates = [stage.machine.lanes for stage in problem.stages]
        layers = problem.profile.layer_profiles()
        self._byte = float(max(max(layer.full_bytes for layer in layers), 1))
        self._second = sum(stage.compute_s for stage in problem.stages) / len(layers) or 1.0
        self._program = pulp.LpProblem("activation_plan", pulp.LpMinimize)
        self._limits: list[tuple[pulp.LpConstraint, Resource, str, float]] = []
        self._excess = self._program.add_variable("excess", 0, None) if relaxed else None
        self.relaxed = relaxed
        self._prices = pulp.LpAffineExpression()
        self._slowest_stage = self._program.add_variable("T", 0, None)
        self._total = pulp.LpAffineExpression()  # sum_s T_s
        self._stalls = 0
        self._stall_within: dict[tuple[int, int, Pass], pulp.LpVariable] = {}
        self._most_held: dict[tuple[Resource, int], pulp.LpVariable] = {}
        self._works: dict[tuple[int, int, Pass], pulp.LpAffineExpression] = {}
        self._exposed_s: dict[tuple[int, int, Pass, float], pulp.LpVariable | float] = {}
        self._device: list[DeviceRows] = []
        counted = _likely_slowest(problem) if bound else problem.stages
        self._stages = [self._groups(stage) if stage in counted else [] for stage in problem.stages]
        for stage in counted:
            self._time_rows(stage)
            self._device_rows(stage)
        self._message_row()
        self._sync_rows()
        for node in problem.nodes:
            self._node_rows(node)
        first = self._slowest_stage if bound and problem.pipeline.stages > 1 else self._total
        self._step = first + (problem.pipeline.microbatches - 1) * self._slowest_stage
        self._program += self._step + self._prices if self._excess is None else self._excess

    def solve(self) -> bool:
        """Solves the program; False if it is infeasible, or with integers if nothing was found in time.

        The solution can be read afterwards.

        Raises:
            SolverFailed: the solver crashed, or a program without integers ran out of time.
        """
        gap, limit_s = (WHOLE_GAP, WHOLE_TIME_LIMIT_S) if self._whole else (0.0, TIME_LIMIT_S)
        solved = solve_model(self._program, time_limit_s=limit_s, gap=gap)
        while solved.found and self._add_broken_rows():
            solved = solve_model(self._program, time_limit_s=limit_s, gap=gap)
        if not solved.proven and not self._whole:
            raise SolverFailed(f"no answer to the activation plan's program in {TIME_LIMIT_S:.0f} s")
        return solved.found

    def at(self, points: Sequence[str]) -> Solution | None:
        """Solves the program of unshared layers with each layer at the point given; None if it is infeasible.

        Raises:
            SolverFailed: as `solve`.
        """
        assert not self.shares
        fixed = {
            variable: float(name == points[stage.indices[group.members[0]]])
            for stage, groups in zip(self.problem.stages, self._stages, strict=True)
            for group in groups
            for name, variable in group.x.items()
        }
        solved = solve_fixed(self._program, fixed, time_limit_s=TIME_LIMIT_S)
        while solved.found and self._add_broken_rows():
            solved = solve_model(self._program, time_limit_s=TIME_LIMIT_S)
        if not solved.proven:
            raise SolverFailed(f"no answer to the activation plan's program in {TIME_LIMIT_S:.0f} s")
        if not solved.found:
            return None
        return Solution(
            points=tuple(points),
            layers=tuple(self._of_layers(self._layer_plan)),
            objective=self.objective,
            step_s=self.step_s,
            limits=tuple(self.limits()),
            changes=self._of_layers(self._changes),
        )

    @property
    def shares(self) -> bool:
        """Whether some layers share variables."""
        return any(len(group.members) > 1 for groups in self._stages for group in groups)

    @property
    def objective(self) -> float:
        """Objective without the prices that break ties: the step's time, or the excess over the relaxed tier."""
        return self.step_s if self.relaxed is None else self.excess_bytes

    @property
    def step_s(self) -> float:
        """Time of a step in the solution, before rounding."""
        return float(pulp.value(self._step) or 0.0) * self._second

    @property
    def priced_s(self) -> float:
        """Step time with the prices that break ties, by which programs of one problem are compared."""
        return self.step_s + float(pulp.value(self._prices) or 0.0) * self._second

    @property
    def excess_bytes(self) -> float:
        """Excess over the relaxed tier's budget; for wear, bytes a day."""
        assert self._excess is not None
        return float(self._excess.varValue or 0.0) * self._byte

    def fractions(self) -> list[Mapping[str, float]]:
        """For each layer of the profile the fraction of it at each point, which add up to 1."""
        return self._of_layers(self._fractions)

    def _of_layers(self, figure: Callable[[LayerGroup], T]) -> list[T]:
        """A figure of each layer of the profile, given that of its group."""
        found: dict[int, T] = {}
        for stage, groups in zip(self.problem.stages, self._stages, strict=True):
            for group in groups:
                found.update(dict.fromkeys((stage.indices[member] for member in group.members), figure(group)))
        return [found[index] for index in range(len(found))]

    def _changes(self, group: LayerGroup) -> dict[str, float]:
        prices = {name: float(variable.dj or 0.0) for name, variable in group.x.items()}
        now = sum(prices[name] * float(variable.varValue or 0.0) for name, variable in group.x.items())
        return {name: price - now for name, price in prices.items()}

    def limits(self) -> list[Limit]:
        """Binding rows that keep the step from being shorter, the one with the highest dual value first."""
        found = []
        for row, resource, where, unit in self._limits:
            price = -float(row.pi or 0.0)
            if price > 1e-9:
                found.append(Limit(resource=resource, where=where, saving=price * self._second / unit))
        return found

    @property
    def tiers_bind(self) -> bool:
        """Whether more host memory or disk would make the step shorter."""
        return any(limit.resource in (Resource.HOST, Resource.DISK) for limit in self.limits())

    # Variables.

    def _groups(self, stage: StageView) -> list[LayerGroup]:
        groups = []
        for chunk, own in enumerate(stage.numbers):
            of_one_kind = len({stage.layers[number].name for number in own}) == 1
            members = members_of(self._sharing, stage.layers, own) if of_one_kind else [[number] for number in own]
            groups += [self._group(stage, chunk, together) for together in members]
        return groups

    def _group(self, stage: StageView, chunk: int, members: list[int]) -> LayerGroup:
        layer, name = stage.layers[members[0]], f"{stage.number}_{members[0]}"
        x = self._point_variables(layer, name)
        self._program += pulp.lpSum(x.values()) == 1  # (1)

        def of_points(figure: Callable[[PointProfile], float], constant: float = 0.0) -> pulp.LpAffineExpression:
            terms = [(x[point.name], number) for point in layer.points if (number := figure(point))]
            return pulp.LpAffineExpression(terms, constant)

        budgets, rates = stage.machine.budgets, self._rates[stage.number]
        moves = members[-1] < len(stage.layers) - (self.staying or 1)
        link = moves and rates.d2h_bytes_per_s > 0 and rates.h2d_bytes_per_s > 0  # (9)
        drive = link and rates.disk_write_bytes_per_s > 0 and rates.disk_read_bytes_per_s > 0
        to_host = link and (budgets.host_bytes or self.relaxed is Resource.HOST)
        to_disk = drive and (budgets.disk_bytes or self.relaxed is Resource.DISK)
        group = LayerGroup(
            stage=stage.number,
            chunk=chunk,
            layer=layer,
            members=members,
            x=x,
            host=self._moved(f"h_{name}", layer) if to_host else Moved(),
            disk=self._moved(f"d_{name}", layer) if to_disk else Moved(),
            saved=of_points(lambda point: point.saved_bytes / self._byte, layer.fixed_bytes / self._byte),
            recompute=of_points(lambda point: point.recompute_s / self._second),
            recompute_extra_bytes=of_points(lambda point: point.beside_bytes / self._byte),
            held=of_points(
                lambda point: (
                    0 if point is layer.points[0] else max(point.held_bytes, layer.repeated_bytes) / self._byte
                )
            ),
            absent=of_points(lambda point: point.absent_bytes / self._byte),
        )
        if group.moves:
            # (2)
            self._program += group.kept >= 0
            self._code(group)
        if self.staying is not None and moves:
            # (10)
            self._program += group.kept == 0
        return group

    def _moved(self, name: str, layer: LayerProfile) -> Moved:
        """Variables of what goes to one tier."""
        plain = self._program.add_variable(name, 0, None)
        if not layer.coded_share:
            return Moved(saved=plain, sent=plain)
        coded = self._program.add_variable(f"coded_{name}", 0, None)
        return Moved(saved=plain + coded, coded=coded, sent=plain + (1 - layer.coded_share) * coded)

    def _code(self, group: LayerGroup) -> None:
        """Constraint (12), and the seconds of coding."""
        layer, coding = group.layer, group.layer.coding
        if coding is None or not layer.coded_share:
            return
        at_all = group.x[ALL] * (layer.full_bytes / self._byte)
        self._program += group.coded <= at_all
        self._program += group.host.saved + group.disk.saved - group.coded <= group.saved - at_all
        group.encode_s, group.decode_s = (
            seconds / self._second * self._byte / layer.full_bytes for seconds in (coding.encode_s, coding.decode_s)
        )

    def _point_variables(self, layer: LayerProfile, name: str) -> dict[str, pulp.LpVariable]:
        """The fractions x of a group."""
        category = pulp.LpInteger if self._whole else pulp.LpContinuous
        return {
            point.name: self._program.add_variable(f"x_{point.name}_{name}", 0, 1, category) for point in layer.points
        }

    # Rows.

    def _time_rows(self, stage: StageView) -> None:
        groups = self._stages[stage.number]
        group_of = {member: group for group in groups for member in group.members}
        loads, fixed = self._loads(stage)
        total = pulp.lpSum(len(group.members) * group.recompute for group in groups)
        total += (stage.compute_s + fixed) / self._second
        total += pulp.lpSum(
            len(group.members) * self._coding(group) for group in groups if group.encode_s or group.decode_s
        )
        counts = collections.Counter(
            (group_of[number].members[0], kind, load) for (number, kind), load in loads.items() if load
        )
        total += pulp.lpSum(count * self._exposed(group_of[key[0]], *key[1:]) for key, count in counts.items())
        out = self._hidden(stage.number, copies_out(stage), self._copy_out, loads)
        back = self._hidden(stage.number, copies_in(stage), self._copy_in, loads)
        total += pulp.lpSum(out + back)
        self._total += total
        if self.problem.pipeline.microbatches > 1:
            # (3)
            self._program += self._slowest_stage >= total

    def _coding(self, group: LayerGroup) -> pulp.LpAffineExpression:
        """Time of coding and decoding one layer of a group."""
        times = 2 if self.problem.pipeline.splits(group.stage, group.chunk) else 1
        return (group.encode_s + times * group.decode_s) * group.coded

    def _message_row(self) -> None:
        """Constraint (3) of the links: each carries one message a microbatch in each direction."""
        stages = self.problem.pipeline.stages
        if stages > 1 and self.problem.pipeline.microbatches > 1:
            longest = max(self.problem.send_s(stage, stage + 1) for stage in range(stages - 1))
            self._program += self._slowest_stage >= longest / self._second

    def _loads(self, stage: StageView) -> tuple[dict[tuple[int, Pass], float], float]:
        """Seconds of collectives beside each layer's passes, and those of a microbatch that are beside none."""
        loads, fixed = {}, 0.0
        for own, of_kinds in zip(stage.numbers, pass_loads(stage), strict=True):
            for kind, load in of_kinds.items():
                loads.update({(number, kind): s for number, s in zip(own, load.while_running, strict=True)})
                fixed += load.before_s + load.after_s
        return loads, fixed

    def _work(self, group: LayerGroup, kind: Pass) -> pulp.LpAffineExpression:
        """Time of one layer's work in a pass, with recompute and coding; the same object for each layer of the group."""
        key = (group.stage, group.members[0], kind)
        if key not in self._works:
            if kind is Pass.FORWARD:
                work = pulp.lpSum([group.layer.forward_s / self._second])
            else:
                share = 1.0 if kind is Pass.BACKWARD else 0.5
                work = pulp.lpSum([share * group.layer.backward_s / self._second])
            if group.encode_s or group.decode_s:
                work = work + (group.encode_s if kind is Pass.FORWARD else group.decode_s) * group.coded
            self._works[key] = work + group.recompute if kind in (Pass.BACKWARD, Pass.INPUT) else work
        return self._works[key]

    def _exposed(self, group: LayerGroup, kind: Pass, load_s: float) -> pulp.LpVariable | float:
        """Time that collectives of `load_s` last beyond one layer's work in a pass; its constraint is made once."""
        key = (group.stage, group.members[0], kind, load_s)
        if key not in self._exposed_s:
            beyond = load_s / self._second - self._work(group, kind)
            if beyond.constant <= 0:
                self._exposed_s[key] = 0.0
            elif beyond.isNumericalConstant():
                self._exposed_s[key] = beyond.constant
            else:
                exposed = self._program.add_variable(f"network_{len(self._exposed_s)}", 0, None)
                where = f"the network's window in {'forward' if kind is Pass.FORWARD else 'backward'}"
                self._add(exposed >= beyond, Resource.NETWORK, where, unit=self._second)
                self._exposed_s[key] = exposed
        return self._exposed_s[key]

    def _sync_rows(self) -> None:
        """Constraint (11). Other stages than the first one have time while the pipeline drains."""
        first = self.problem.stages[0]
        load = sync_load(first)
        if load is None or not self._stages[0]:
            return
        group_of = {member: group for group in self._stages[0] for member in group.members}
        loads, _ = self._loads(first)
        late: pulp.LpVariable | float = 0.0
        for number, step in enumerate(load.steps):
            least = WeightedSum((step.sync_s - step.end_s + step.network_s) / self._second)
            least.add(1.0, late)
            if step.layer is not None:
                group, at = group_of[step.layer], (step.layer, load.kind)
                least.add(-1.0, self._work(group, load.kind))
                least.add(-1.0, self._exposed(group, load.kind, loads[at]))
                least.add(-1.0, self._stall_within.get((0, *at), 0.0))
            late = self._program.add_variable(f"late_{number}", step.sync_s / self._second, None)
            least.add(-1.0, late)
            self._program += least.expression() <= 0
        self._total += late

    def _hidden(
        self,
        stage: int,
        windows: Iterable[Window],
        row: Callable[[LayerGroup, LayerGroup | None, Window, float], pulp.LpVariable],
        loads: Mapping[tuple[int, Pass], float],
    ) -> list[pulp.LpAffineExpression]:
        """Stalls of all these copies; each kind of copy gets one variable."""
        group_of = {member: group for group in self._stages[stage] for member in group.members}
        times: collections.Counter[tuple[int, int | None, Pass, float]] = collections.Counter()
        alike: dict[tuple[int, int | None, Pass, float], list[Window]] = {}
        for window in windows:
            moving = group_of[window.moving]
            if not moving.moves:
                continue
            hiding, load = None, 0.0
            if window.hidden_by is not None:
                hiding, load = group_of[window.hidden_by].members[0], loads[window.hidden_by, window.kind]
            key = (moving.members[0], hiding, window.kind, load)
            times[key] += window.times  # type: ignore[assignment]  # counts of turns are fractions of microbatches
            alike.setdefault(key, []).append(window)
        stalls = []
        for key, its_windows in alike.items():
            hider = None if key[1] is None else group_of[key[1]]
            stall = row(group_of[key[0]], hider, its_windows[0], key[3])
            stalls.append(times[key] * stall)
            for window in its_windows:
                if window.within and window.hidden_by is not None:
                    self._stall_within[stage, window.hidden_by, window.kind] = stall
        return stalls

    def _copy_out(
        self, moving: LayerGroup, hiding: LayerGroup | None, window: Window, load_s: float
    ) -> pulp.LpVariable:
        """Constraint (4): stall of a copy out."""
        rates = self._rates[moving.stage]
        moved = self._seconds(rates.d2h_bytes_per_s)
        self._prices += len(moving.members) * moved * (MOVING_PRICE * moving.host.sent + DISK_PRICE * moving.disk.sent)
        lane = (rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s)
        return self._copy(moving, *lane, self._room(hiding, window, load_s), Resource.COPY_OUT, window)

    def _copy_in(self, moving: LayerGroup, hiding: LayerGroup | None, window: Window, load_s: float) -> pulp.LpVariable:
        """Constraint (5): stall of a copy in."""
        rates = self._rates[moving.stage]
        lane = (rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s)
        return self._copy(moving, *lane, self._room(hiding, window, load_s), Resource.COPY_IN, window)

    def _room(self, hiding: LayerGroup | None, window: Window, load_s: float) -> pulp.LpAffineExpression | float:
        """Time of a copy's window."""
        if hiding is None:
            return 0.0
        return self._work(hiding, window.kind) + self._exposed(hiding, window.kind, load_s)

    def _copy(
        self,
        moving: LayerGroup,
        link: float,
        disk: float,
        room: pulp.LpAffineExpression | float,
        resource: Resource,
        window: Window,
    ) -> pulp.LpVariable:
        """Stall of one copy, with a row for the link and one for the disk."""
        way = "forward" if resource is Resource.COPY_OUT else "backward"
        self._stalls += 1
        stall = self._program.add_variable(f"{way}_{moving.stage}_{window.moving}_{self._stalls}", 0, None)
        row = stall >= (moving.host.sent + moving.disk.sent) * self._seconds(link) - room
        self._add(row, resource, f"the link's window in {way}", unit=self._second)
        if moving.to_disk:
            by_disk = moving.disk.sent * self._seconds(min(link, disk))
            held_up = moving.host.sent * (disk_delay(link, disk) * self._byte / self._second)
            row = stall >= by_disk + held_up - room
            self._add(row, resource, f"the disk's window in {way}", unit=self._second)
        return stall

    def _device_rows(self, stage: StageView) -> None:
        """Prepares rows (6)."""
        groups = self._stages[stage.number]
        names, resident, counts = grouped_peak_candidates(stage, tuple(len(group.members) for group in groups))
        room = (stage.machine.budgets.device_bytes - resident) / self._byte
        parts = [group.device_parts(self._byte) for group in groups]
        self._device.append(DeviceRows(names=names, room=room, counts=counts, parts=parts))
        if self._whole:
            self._add_device_rows(self._device[-1], range(len(names)))

    def _add_broken_rows(self) -> bool:
        """Adds the rows (6) that the solution breaks most; False if it breaks none."""
        excess = self.excess_bytes / self._byte if self.relaxed is Resource.DEVICE else 0.0
        added = False
        for rows in self._device:
            broken = rows.broken(excess)
            self._add_device_rows(rows, broken)
            added = added or bool(broken)
        return added

    def _add_device_rows(self, rows: DeviceRows, numbers: Iterable[int]) -> None:
        for number in numbers:
            rows.added.add(number)
            used = WeightedSum()
            for part, count in rows.terms(number):
                used.add(count, part)
            self._budget(used.expression(), float(rows.room[number]), Resource.DEVICE, f"at {rows.names[number]}")

    def _held(self, stage: int, tier: Resource) -> pulp.LpAffineExpression:
        """Peak bytes of a lower tier that one rank of a stage holds."""
        counts = self.problem.pipeline.peak_in_flight(stage)
        sums = [
            pulp.lpSum(
                held[group.chunk] * len(group.members) * (group.host if tier is Resource.HOST else group.disk).sent
                for group in self._stages[stage]
            )
            for held in counts
        ]
        if len(sums) == 1:
            return sums[0]
        if (tier, stage) not in self._most_held:
            most = self._most_held[tier, stage] = self._program.add_variable(f"held_{tier}_{stage}", 0, None)
            for one in sums:
                self._program += most >= one
        return pulp.LpAffineExpression(self._most_held[tier, stage])

    def _node_rows(self, stages: Mapping[int, int]) -> None:
        """Rows of the budgets that a node's ranks share; `stages` is the number of ranks by stage."""
        problem, budgets = self.problem, self.problem.stages[min(stages)].machine.budgets
        host = pulp.lpSum(ranks * self._held(stage, Resource.HOST) for stage, ranks in stages.items())
        disk = pulp.lpSum(ranks * self._held(stage, Resource.DISK) for stage, ranks in stages.items())
        written = pulp.lpSum(
            ranks * len(group.members) * problem.pipeline.microbatches * group.disk.sent
            for stage, ranks in stages.items()
            for group in self._stages[stage]
        )
        rounding = sum(
            ranks * rounding_bytes(problem.stages[stage], divided=self.staying is None)
            for stage, ranks in ({} if self._bound else stages).items()
        )
        for used, budget, tier in (
            (host, budgets.host_bytes, Resource.HOST),
            (disk, budgets.disk_bytes, Resource.DISK),
        ):
            room = budget - rounding if tier is self.relaxed else max(0, budget - rounding)
            # (7)
            self._budget(used, room / self._byte, tier, "of the node")
        if budgets.disk_wear_bytes_per_day is None or not written:
            return
        per_second = budgets.disk_wear_bytes_per_day / DAY_S / self._byte * self._second
        for stage in stages:
            compute = problem.stages[stage].compute_s / self._second
            busy = compute + pulp.lpSum(len(group.members) * group.recompute for group in self._stages[stage])
            least = per_second * problem.pipeline.microbatches * compute
            # (8)
            row = written <= per_second * problem.pipeline.microbatches * busy - min(MARGIN, least)
            self._add(row, Resource.WEAR, "of the node", unit=self._byte * DAY_S)

    def _budget(self, used: pulp.LpAffineExpression, room: float, resource: Resource, where: str) -> None:
        if self.relaxed is resource and self._excess is not None:
            used, room = used - self._excess, room - MARGIN  # a budget larger by the excess then has its margin
        else:
            room = max(room - MARGIN, min(room, 0.0))
        if used or room < 0:
            self._add(used <= room, resource, where, unit=self._byte)

    def _add(self, row: pulp.LpConstraint, resource: Resource, where: str, *, unit: float) -> None:
        self._program += row
        self._limits.append((row, resource, where, unit))

    def _seconds(self, bytes_per_s: float) -> float:
        """Time units per byte unit."""
        return self._byte / bytes_per_s / self._second

    def _fractions(self, group: LayerGroup) -> dict[str, float]:
        x = {name: min(max(float(variable.varValue or 0.0), 0.0), 1.0) for name, variable in group.x.items()}
        x[ALL] = max(1.0 - sum(share for name, share in x.items() if name != ALL), 0.0)
        return x

    def _layer_plan(self, group: LayerGroup) -> LayerPlan:
        x, saved = self._fractions(group), float(pulp.value(group.saved))
        host, disk = (max(float(pulp.value(part.saved) or 0.0), 0.0) for part in (group.host, group.disk))
        host, disk = (part if part > MARGIN else 0.0 for part in (host, disk))
        if saved - host - disk < MARGIN and host + disk > 0.0:
            saved = host + disk
        return LayerPlan(
            point=max(x, key=x.__getitem__),
            kept=max(saved - host - disk, 0.0) / saved if saved else 1.0,
            host=host / saved if saved else 0.0,
            disk=disk / saved if saved else 0.0,
        )


def _likely_slowest(problem: ActivationProblem) -> list[StageView]:
    """The stage that computes for longest, and of the others the one that would hold most."""
    stages = list(problem.stages)

    def held(stage: StageView) -> int:
        saved = [sum(stage.layers[number].full_bytes for number in chunk) for chunk in stage.numbers]
        flights = problem.pipeline.peak_in_flight(stage.number)
        most = max(sum(n * nbytes for n, nbytes in zip(flight, saved, strict=True)) for flight in flights)
        return stage.static.nbytes + most

    longest = max(stages, key=lambda stage: (stage.compute_s, held(stage)))
    return [longest, *sorted((stage for stage in stages if stage is not longest), key=held)[-1:]]
