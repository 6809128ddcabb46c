"""Exposed seconds of a layer's tensor-parallel collectives, where two halves of its rows run beside each other.

Owns the timeline of one pass: the steps of both halves in the order of memo.gpt.half_order on the compute stream, and
their collectives one after another on the network. A step waits for the last collective of its half. Computation is not
slowed down by a collective beside it. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.gpt.arithmetic.collectives import CollectiveKind, exchange_s
from memo.gpt.half_order import MLP_ALONE, WHOLE_LAYER

if TYPE_CHECKING:
    from memo.gpt.arithmetic.block_bytes import BlockBytes
    from memo.gpt.arithmetic.layout import StepLayout
    from memo.gpt.arithmetic.step_collectives import StepCollectives
    from memo.mip.inputs import Hardware

HALF_ROWS = 128
"""Rows by which two products of half the rows take longer than one, as two tiles do (profile_by_arithmetic.TILE_ROWS)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HalvedWork:
    """Seconds of computation of one layer, all rows together."""

    products: tuple[float, float, float, float]
    """Forward's matrix products: to queries, keys and values; attention's last one; to the MLP's width; its last one."""
    attends: tuple[float, float]
    """Attention's kernel and rotation, forward and backward."""
    activates: tuple[float, float]
    """The MLP's activation."""
    rest: tuple[float, float]
    """Norms and residuals."""


@dataclasses.dataclass(frozen=True, slots=True)
class HalfCollectives:
    """Seconds of the collectives of one half of the rows."""

    entering: tuple[float, float]
    """Seconds for a projection's input: of the gather, and in backward of the sum of its gradient over the ranks."""
    leaving: tuple[float, float]
    """Seconds for a last projection's result: of the sum over the ranks, and in backward of the gather of its gradient."""
    again: float
    """Gather of a projection's input, repeated in backward."""

    def all_s(self, *, backward: bool) -> float:
        """Seconds of those of one attention or one MLP, both halves one after another."""
        return 2 * (self.entering[backward] + self.leaving[backward] + self.again * backward)


_NONE = HalfCollectives((0.0, 0.0), (0.0, 0.0), 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Launch:
    seconds: float


_WAIT = "wait"
"""Until the last collective of its half has ended."""
_Step = Sequence[float | str | _Launch]
"""Seconds of computation, waits and launches, one after another."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorOverlap:
    """Exposed seconds of the collectives in the passes of one layer."""

    work: HalvedWork
    half: HalfCollectives
    of_tokens: bool
    """The halves are of one sequence's tokens: attention and its collectives are not divided."""

    @property
    def forward_s(self) -> float:
        """Exposed seconds of a forward."""
        if self.of_tokens:
            return self._exposed(MLP_ALONE, lambda half: self._forward(half)[3:]) + self.half.all_s(backward=False)
        return self._exposed(WHOLE_LAYER, self._forward)

    @property
    def again_s(self) -> float:
        """Exposed seconds of a replay of all but attention's kernel and the last projection."""
        work = dataclasses.replace(self.work, attends=(0.0, 0.0))
        replay = dataclasses.replace(self, work=work)
        if self.of_tokens:
            return self._exposed(MLP_ALONE, lambda half: replay._forward(half)[3:5]) + self.half.all_s(backward=False)
        return self._exposed(WHOLE_LAYER, lambda half: replay._forward(half)[:5])

    @property
    def backward_s(self) -> float:
        """Exposed seconds of a backward."""
        if self.of_tokens:
            exposed_s = self._exposed(MLP_ALONE[::-1], lambda half: self._backward(half)[:4])
            return exposed_s + self.half.all_s(backward=True)
        return self._exposed(WHOLE_LAYER[::-1], self._backward)

    def _exposed(self, order: str, steps: Callable[[HalfCollectives], Sequence[_Step]]) -> float:
        return _timeline_s(order, steps(self.half)) - _timeline_s(order, steps(_NONE))

    def _forward(self, half: HalfCollectives) -> list[_Step]:
        """Steps 0 to 6 of one half, by memo.gpt.half_order."""
        enters, leaves, rest = _Launch(half.entering[0]), _Launch(half.leaving[0]), self.work.rest[0] / 4
        to_heads, from_heads, widens, narrows = (seconds / 2 for seconds in self.work.products)
        return [
            [enters],
            [_WAIT, to_heads, self.work.attends[0] / 2],
            [from_heads, leaves],
            [_WAIT, rest, enters],
            [_WAIT, widens, self.work.activates[0] / 2],
            [narrows, leaves],
            [_WAIT, rest],
        ]

    def _backward(self, half: HalfCollectives) -> list[_Step]:
        """Steps 6 to 0. A projection has two products; the first, of its input's gradient, hides the repeated gather."""
        enters, leaves, rest = _Launch(half.entering[1]), _Launch(half.leaving[1]), self.work.rest[1] / 4
        again = _Launch(half.again)
        to_heads, from_heads, widens, narrows = (seconds / 2 for seconds in self.work.products)
        return [
            [rest, leaves],
            [_WAIT, 2 * narrows],
            [self.work.activates[1] / 2, again, widens, _WAIT, widens, enters],
            [_WAIT, rest, leaves],
            [_WAIT, 2 * from_heads],
            [self.work.attends[1] / 2, again, to_heads, _WAIT, to_heads, enters],
            [_WAIT],
        ]


def _timeline_s(order: str, steps: Sequence[_Step]) -> float:
    """Seconds until the last step of both halves has ended; of an order longer than the steps, the rest is left out."""
    now = network = 0.0
    ready, following = {"a": 0.0, "b": 0.0}, {"a": iter(steps), "b": iter(steps)}
    for half in order:
        for part in next(following[half], ()):
            if isinstance(part, _Launch):
                ready[half] = network = max(network, now) + part.seconds
            elif isinstance(part, str):
                now = max(now, ready[half])
            else:
                now += part
    return now


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSeconds:
    """Seconds that tensor parallelism adds to the passes of one layer."""

    forward_s: float
    """Seconds that a forward waits for collectives."""
    backward_s: float
    again_s: float
    """Seconds that a replay of the whole layer waits for them."""
    halving_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of computation, forward and backward: products of half the rows, and copies that join the halves."""
    launches: int = 1
    """Times that each kernel is launched."""

    @classmethod
    def of(
        cls,
        step: StepCollectives,
        block: BlockBytes,
        machine: Hardware,
        attention_s: tuple[float, float],
        *,
        experts: bool = False,
    ) -> TensorSeconds:
        """Seconds of a layer.

        Args:
            step: the collectives of the layout.
            block: figures of the layer.
            machine: its rates.
            attention_s: seconds of attention's kernel, forward and backward.
            experts: the layer is a mixture of experts.
        """
        layout, back = step.layout, step.tensor_backward(experts=experts)
        if len(layout.halves) == 1:
            passes = step.tensor_forward(experts=experts), back, step.tensor_again(experts=experts)
            forward_s, backward_s, again_s = (exchange_s(each, machine, layout) for each in passes)
            return cls(forward_s=forward_s, backward_s=backward_s, again_s=again_s)
        of_tokens, memory_s = layout.batch == 1, layout.rank_tokens / machine.elementwise_bytes_per_s
        gather_s = step.half_s(CollectiveKind.ALL_GATHER, machine)
        sum_s = step.half_s(CollectiveKind.REDUCE_SCATTER, machine)
        half = HalfCollectives((gather_s, sum_s), (sum_s, gather_s), gather_s)
        overlap = TensorOverlap(work=_work(step, block, machine, attention_s), half=half, of_tokens=of_tokens)
        shared = [each for each in back if each.kind is CollectiveKind.ALL_REDUCE]
        # A tiled MLP gathers its input again before it computes anything.
        tiled_s = 2 * gather_s if step.config.mlp_tiles > 1 else 0.0
        divided = block.mlp if of_tokens else block.projections
        products_s = HALF_ROWS * divided / layout.tp / machine.product_flops_per_s
        copied_s = 2 * step.config.hidden * step.stream_nbytes * memory_s
        return cls(
            forward_s=overlap.forward_s,
            backward_s=overlap.backward_s + exchange_s(shared, machine, layout) + tiled_s,
            again_s=overlap.again_s,
            halving_s=(products_s + copied_s, 2 * (products_s + copied_s)),
            launches=2,
        )


def _work(step: StepCollectives, block: BlockBytes, machine: Hardware, attention_s: tuple[float, float]) -> HalvedWork:
    config, tokens = step.config, step.layout.rank_tokens
    memory_s = tokens / machine.elementwise_bytes_per_s
    column_s = 2 * config.hidden * tokens / machine.product_flops_per_s
    ups = 2 if config.mlp == "swiglu" else 1
    wide, last = (ups * config.ffn, config.ffn) if config.mlp_tiles == 1 else ((ups + 1) * config.ffn, 0)
    apart = [block.rotation[i] + block.activation[i] for i in (0, 1)]
    return HalvedWork(
        products=(config.qkv_width * column_s, config.hidden * column_s, wide * column_s, last * column_s),
        attends=(attention_s[0] + block.rotation[0] * memory_s, attention_s[1] + block.rotation[1] * memory_s),
        activates=(block.activation[0] * memory_s, block.activation[1] * memory_s),
        rest=((block.elementwise - apart[0]) * memory_s, (block.elementwise_backward - apart[1]) * memory_s),
    )


def require_halves(layout: StepLayout, *, lora: int = 0) -> None:
    """Raises UsageError where layers are to run in halves and cannot, or memo train has no such layers."""
    if len(layout.halves) > 1 and lora:
        raise UsageError("--tp-overlap is of memo train, which has no adapters; leave it out with --lora")
    if min(layout.halves) == 0:
        raise UsageError(
            "--tp-overlap: one sequence with one token on a rank has no halves; use --batch 2 or "
            f"--seq {2 * layout.tp * layout.cp}"
        )
