"""Recompute of a whole layer, for layers whose tokens cannot be divided: only the input moves, and all of it runs again.

That is activation checkpointing, by the engine's own way: what the layer saved is known by position, and the first of it
that backward asks for runs the layer once more, with the random numbers, the autocast and the kernels of its forward.
Attention is repeated too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memo.errors import MemoError
from memo.swap.engine.token_prefix import Rows, TokenPrefix
from memo.swap.recompute.axis.operator_rules import Unproven
from memo.swap.recompute.axis.token_axis import Layout
from memo.swap.recompute.replay import LayerCall, Span, Wanted
from memo.swap.recompute.token_split import Division
from memo.swap.tensor_kinds import is_plain
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.recompute.forward_record import ForwardRecord
    from memo.swap.recompute.level_costs import Costs

__all__ = ["repeat_whole"]


def repeat_whole(watch: ForwardRecord, output: Any, engine: Engine, costs: Costs) -> Division | None:
    """None where the layer saved nothing that could be computed again: a checkpointed layer.

    Raises:
        Unproven: its forward changes what a second one would start from, or does what cannot be followed.
    """
    try:
        watch.check_unchanged()
        if watch.script.reason is not None:
            raise Unproven(watch.script.reason)
    except MemoError as error:
        raise Unproven(str(error)) from error
    wanted = _wanted(watch, output, engine)
    if not wanted:
        return None
    hidden = engine.pack(watch.given)
    source = engine.saved_as(watch.hidden.untyped_storage())
    costs.counted_whole(
        tokens=watch.tokens,
        input_bytes=0 if source is None else source.nbytes,
        nbytes=sum(saved.nbytes for saved in watch.group.living()),
    )
    call = LayerCall(
        engine,
        watch.layer.module,
        watch.layer.name,
        hidden=hidden,
        hidden_grad=watch.given.requires_grad,
        arguments=watch.arguments,
        state=watch.state,
        precision=watch.precision,
        span=Span(first=0, stop=1, level=Level.SAVE_INPUT, wanted=tuple(wanted.values())),
        before=None,
        tokens=watch.tokens,
        costs=costs,
        together=watch.together,
        script=watch.script,
        random=watch.random,
    )
    assert watch.saves is not None
    left_out = len(watch.saves) - 1 - max(want.position for want in wanted.values())
    parts = {saved: TokenPrefix(call, want.rows, tokens=1, first=0) for saved, want in wanted.items()}
    return Division(calls=(call,), parts=parts, left_out=left_out)


def _wanted(watch: ForwardRecord, output: Any, engine: Engine) -> dict[SavedStorage, Wanted]:
    """Each storage once, at the first place where autograd saved it as it is; its bytes are all "one token"."""
    assert watch.saves is not None
    seen = watch.kept_whole(output)
    wanted: dict[SavedStorage, Wanted] = {}
    for position, (tensor, content) in enumerate(watch.saves):
        if not is_plain(tensor):
            continue  # a parameter's view or a subclass, which does not move
        storage = tensor.untyped_storage()
        saved = None if storage in seen else engine.saved_as(storage)
        if saved is None or saved.group is not watch.group or saved.content != content:
            continue
        if not watch.script.knows(tensor):
            raise Unproven(
                "it saves what no operator made: a function in it is compiled, and what that reads is not seen"
            )
        seen.add(storage)
        wanted[saved] = Wanted(
            position=position,
            hold=saved.hold,
            axis=None,
            rows=Rows(rows=1, width=saved.nbytes),
            layout=Layout(shape=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset())),
            dtype=tensor.dtype,
        )
    return wanted
