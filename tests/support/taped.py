"""Records a function by hand, without engine and layers: its tape, a plan of it, and what the plan's replay gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memo.swap import Bans, Level
from memo.swap.recompute.tape.bans import NO_BANS, banned
from memo.swap.recompute.tape.checksums import Checksums
from memo.swap.recompute.tape.cut import cheapest
from memo.swap.recompute.tape.log import Origin
from memo.swap.recompute.tape.plan import Plan, Sources, plan_of, problem_of
from memo.swap.recompute.tape.recorder import Recorder, aside
from memo.swap.recompute.tape.step_costs import step_costs
from memo.swap.recompute.tape.tape import Tape, TapeStep


@dataclasses.dataclass
class Taped:
    """One recorded call."""

    recorder: Recorder
    tape: Tape
    out: Any
    sources: dict[int, torch.Tensor]
    """Storage that autograd saved -> its bytes at the end of the forward, copied."""

    def step(self, name: str, which: int = 0) -> TapeStep:
        """The step of that name, as `aten.mm`."""
        return [step for step in self.tape.steps if step.name == name][which]

    @property
    def wanted(self) -> tuple[int, ...]:
        """Saved storages that the layer made."""
        return tuple(number for number in sorted(self.sources) if self.tape.storages[number][0] is Origin.MADE)

    def there(self) -> Sources:
        """What can be kept: arguments and parameters for nothing, and what autograd saved or the recorder holds."""
        births = {number: self.tape.storages[number][0] for number in self.recorder.tensors}
        free = {number for number, birth in births.items() if birth not in (Origin.MADE, Origin.FOUND)}
        saved = {number for number in self.sources if number not in free}
        return Sources(
            free=frozenset(free),
            saved=frozenset(saved),
            held=frozenset(births) - free - saved,
            bits=frozenset(self.recorder.bits),
        )

    def plan(self, level: Level = Level.SAVE_INPUT, *, bans: Iterable[int] = (), chosen: Bans = NO_BANS) -> Plan:
        """The plan that keeps least at a level."""
        sources, stays = self.there(), banned(self.tape, level, chosen=chosen, also=bans)
        cut = cheapest(problem_of(self.tape, stays, sources, self.wanted, (), self.tape.costs), 1, 0)
        return plan_of(self.tape, cut, sources, self.wanted)

    def replay(self, plan: Plan) -> dict[int, torch.Tensor]:
        """Storage -> its bytes as the replay makes them."""
        given: dict[int, torch.Tensor] = {}

        def kept(position: int) -> torch.Tensor:
            item = plan.kept[position]
            return (
                self.recorder.bits[item.bits_of] if item.bits_of >= 0 else self.recorder.tensors[item.storage].detach()
            )

        def give(position: int, made: torch.Tensor) -> None:
            given[plan.wanted[position]] = content(made)

        with torch.no_grad():
            plan.replay(kept, self.recorder.carried, give, torch.device("cpu"))
        return given


def content(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,)).clone()


def record(
    function: Callable[..., Any], hidden: torch.Tensor, *given: torch.Tensor, checked: bool = False, **options: Any
) -> Taped:
    """Records one call of a function, with gradients."""
    recorder = Recorder(hidden, given, checksums=Checksums() if checked else None, **options)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with aside(recorder, tensor):
            recorder.save(tensor)
            return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), recorder:
        out = function(hidden, *given)
    tape = Tape(recorder.key, recorder.changed_unseen())
    tape.costs = step_costs(tape, "cpu")
    saved = {
        number: content(recorder.tensors[number])
        for number in sorted(tape.saved_storages)
        if tape.storages[number][0] is not Origin.PARAMETER
    }
    return Taped(recorder, tape, out, saved)


def assert_replays(taped: Taped, level: Level = Level.SAVE_INPUT, **choice: Any) -> Plan:
    """Each storage that the plan does not keep is given again, to the last bit; returns the plan."""
    plan = taped.plan(level, **choice)
    given = taped.replay(plan)
    assert set(given) == set(plan.wanted)
    for storage, made in given.items():
        assert torch.equal(made, taped.sources[storage]), f"storage {storage} by\n{plan.code}"
    return plan
