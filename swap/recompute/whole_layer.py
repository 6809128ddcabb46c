"""Whole-layer recompute (activation checkpointing): only the layer's input moves, and its forward runs again in backward.

Saved tensors are identified by position. The first one that backward asks for runs the layer once more, with the RNG
state, autocast and attention kernels of its forward; attention is repeated, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memo.errors import MemoError
from memo.swap.engine.token_prefix import Rows, TokenPrefix
from memo.swap.recompute.axis.operator_rules import Unproven
from memo.swap.recompute.axis.token_axis import Layout
from memo.swap.recompute.replay import Span, Wanted
from memo.swap.recompute.token_split import Division
from memo.swap.tensor_kinds import is_plain
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.recompute.forward_record import ForwardRecord
    from memo.swap.recompute.level_costs import Costs

__all__ = ["repeat_whole"]


def repeat_whole(record: ForwardRecord, output: Any, engine: Engine, costs: Costs) -> Division | None:
    """The recompute of the whole call; None where the layer saved nothing to recompute (a checkpointed layer).

    Raises:
        Unproven: its forward changes what a second one would start from, or does what cannot be followed.
    """
    try:
        record.check_unchanged()
        if record.script.reason is not None:
            raise Unproven(record.script.reason)
    except MemoError as error:
        raise Unproven(str(error)) from error
    wanted = _wanted(record, output, engine)
    if not wanted:
        return None
    hidden = engine.pack(record.given)
    costs.counted_whole(tokens=record.tokens, input_bytes=record.input_nbytes(engine), nbytes=record.saved_nbytes())
    span = Span(first=0, stop=1, level=Level.SAVE_INPUT, wanted=tuple(wanted.values()))
    call = record.replay(engine, costs, span, hidden)
    assert record.saves is not None
    left_out = len(record.saves) - 1 - max(want.position for want in wanted.values())
    parts = {saved: TokenPrefix(call, want.rows, tokens=1, first=0) for saved, want in wanted.items()}
    return Division(calls=(call,), parts=parts, left_out=left_out)


def _wanted(record: ForwardRecord, output: Any, engine: Engine) -> dict[SavedStorage, Wanted]:
    """Each storage once, at the first position where autograd saved its present content, counted as one token."""
    assert record.saves is not None
    seen = record.kept_whole(output)
    wanted: dict[SavedStorage, Wanted] = {}
    for position, (tensor, content) in enumerate(record.saves):
        if not is_plain(tensor):
            continue  # a parameter's view or a subclass, which does not move
        storage = tensor.untyped_storage()
        saved = None if storage in seen else record.saved_storage(engine, storage)
        if saved is None or saved.content != content:
            continue
        if not record.script.knows(tensor):
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
