"""Context parallelism of a decoder of transformers: each rank has its own tokens of every sequence, in all layers.

Only attention needs the tokens of other ranks: it is given to transformers by name, and ranks exchange heads for tokens
around torch's kernel (memo.parallel.Ulysses). Before anything is divided, a run of the whole model without data proves that
nothing else mixes tokens (memo.parallel.decoders.token_flow).

    batch                input_ids and labels of whole sequences, on every rank of a group
    forward              this rank's tokens and their positions; logits of these tokens
    loss                 labels are shifted before they are divided; the sum over the ranks, on every rank
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from memo.errors import UsageError, one_line
from memo.parallel.collectives import copy_in, own_shard, sum_out
from memo.parallel.decoders.calls import tracing
from memo.parallel.decoders.operators import NotDivisible
from memo.parallel.decoders.token_flow import check_tokens
from memo.parallel.rank_agreement import require_same_batch
from memo.parallel.ulysses import Ulysses

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "memo_context_parallel"
_IGNORED = -100
_HARMLESS = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")
"""Arguments of a forward that change neither its logits nor its loss."""
_PASSED = ("sliding_window", "position_ids", "position_embeddings", "labels", "num_items_in_batch", *_HARMLESS)
"""Arguments that attention is given and need not know; torch's kernel takes no others."""
_Attend = Callable[..., torch.Tensor]
_attends: weakref.WeakKeyDictionary[nn.Module, _Attend] = weakref.WeakKeyDictionary()
"""Modules to the attention that they call: `_kernel` or what is around it."""


class Sequences:
    """Divides a batch's sequences over a group of ranks.

    Args:
        model: what takes the batch.
        group: ranks that share each sequence.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._accepts = _accepts(model)
        self._group = group

    def own(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Named arguments of a forward on this rank's tokens, from those of whole sequences; labels stay whole.

        Raises:
            UsageError: on every rank, where tokens do not divide or an argument asks for other than causal attention.
        """
        ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if ids is None or batch.get("past_key_values") is not None:
            raise UsageError("with cp a model trains on input_ids, without past_key_values or inputs_embeds")
        known = ("input_ids", "labels", "attention_mask", "position_ids", "num_items_in_batch")
        for name, value in batch.items():
            if name not in (*known, *_HARMLESS) and (isinstance(value, torch.Tensor) or value):
                raise UsageError(f"{name}: with cp a forward takes {', '.join(known)} alone; leave it out")
        labels = batch.get("labels")
        require_same_batch(self._group, ids, *(one for one in (labels, mask, positions) if one is not None))
        ranks, tokens = self._group.size(), ids.shape[1]
        if tokens % ranks:
            raise UsageError(
                f"a sequence of {tokens} tokens does not divide over cp={ranks} ranks; pad it to a multiple"
            )
        if mask is not None and not bool(mask.all()):
            raise UsageError(
                "attention_mask: with cp each token sees all before it; pad at the end, with labels of -100"
            )
        every = torch.arange(tokens, device=ids.device).expand_as(ids)
        if positions is not None and not torch.equal(positions.expand_as(ids), every):
            raise UsageError("position_ids: with cp tokens are numbered from 0 in each row; leave it out")
        own = own_shard(ids, self._group, 1)
        given = {"attention_mask": torch.ones_like(own), "position_ids": own_shard(every, self._group, 1)}
        given = {name: value for name, value in given.items() if self._accepts(name)}
        return {**batch, **given, "input_ids": own, "use_cache": False}


def check_context(model: nn.Module, *, ranks: int = 2, tp: int = 1) -> None:
    """Checks without data that the model's tokens can be divided over ranks.

    Args:
        model: of transformers.
        ranks: that share a sequence.
        tp: ranks that divide the heads before.

    Raises:
        UsageError: something but attention mixes tokens, or attention is not plainly causal.
    """
    name = type(model).__name__
    _register()
    lm = _with_loss(model)
    accepts = _accepts(model)
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise UsageError("output_router_logits adds a loss over all tokens; set it to False")

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any, causal: bool, window: _Window | None
    ) -> torch.Tensor:
        if query.shape[2] % (tp * ranks):
            raise NotDivisible(f"{tp * ranks} ranks do not divide the {query.shape[2]} heads")
        out = query.mean(-1, keepdim=True) + key.mean((2, 3), keepdim=True) + value.mean(2, keepdim=True)
        for number in (scale, causal, None if window is None else window.reach):  # as operators show them
            out = out if number is None else out * number
        return out

    def forward(tensors: dict[str, torch.Tensor], ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            found.append((logits, labels, logits.new_zeros(())))
            return found[-1][2]

        targets = torch.empty_like(ids)
        batch = {"input_ids": ids, "labels": targets, "position_ids": positions, "use_cache": False}
        batch["attention_mask"] = torch.ones_like(ids)
        with _loss_of(lm, loss):
            given = {k: v for k, v in batch.items() if accepts(k)}
            output = torch.func.functional_call(model, tensors, (), given, tie_weights=False)
        if len(found) != 1 or output.loss is not found[0][2] or output.loss._version or found[0][1] is not targets:
            raise NotDivisible("its loss is not its loss_function's alone")
        return found[0][0]

    _attends.update(dict.fromkeys(model.modules(), attend))
    try:
        with tracing(model, attention=NAME):
            check_tokens(model, forward, ranks=ranks)
    except Exception as error:
        reason = str(error) if isinstance(error, NotDivisible) else f"{type(error).__name__}: {one_line(error)}"
        raise UsageError(
            f"the tokens of {name} cannot be divided over cp={ranks} ranks: {reason}; use tp and pp"
        ) from error
    finally:
        for module in model.modules():
            _attends.pop(module, None)


def apply(model: nn.Module, group: dist.ProcessGroup) -> Sequences:
    """Has the model attend to the tokens of all ranks, and sum its loss over them, in place.

    Gradients are those of the mean over ranks once they are averaged over the group.
    """
    ulysses = Ulysses(_kernel, group)
    lm: Any = _with_loss(model)
    for module in model.modules():
        _attends[module] = ulysses
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME
    whole = lm.loss_function

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **named: Any) -> torch.Tensor:
        targets = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        if named.get("num_items_in_batch") is None:
            named["num_items_in_batch"] = (targets != _IGNORED).sum()
        own = own_shard(targets, group, 1).contiguous()
        part = whole(logits=logits, labels=None, vocab_size=vocab_size, shift_labels=own, **named)
        return copy_in(sum_out(part, group), group)

    lm.loss_function = loss
    return Sequences(model, group)


def divide_batches(model: nn.Module, sequences: Sequences) -> None:
    """Has each forward of the model take whole sequences and run on this rank's tokens."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > 1:
            raise UsageError("with cp name all arguments of a forward but input_ids")
        return (), sequences.own({**kwargs, **({"input_ids": args[0]} if args else {})})

    model.register_forward_pre_hook(hook, with_kwargs=True)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    causal: bool,
    window: _Window | None,
) -> torch.Tensor:
    """Torch's attention of (batch, tokens, heads, head size); values may be narrower than keys."""
    width = value.shape[-1]
    if width < key.shape[-1]:  # fused kernels want equal heads
        value = F.pad(value, (0, key.shape[-1] - width))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    mask = window.whole(q.shape[2], q.device) if window is not None and window.reach < q.shape[2] else None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )
    return out[..., :width].transpose(1, 2).contiguous()


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


class _Window(torch.Tensor):
    """Place of a mask of causal attention to the last `reach` tokens: empty, since only attention has all tokens."""

    reach: int
    mask: torch.Tensor | None = None

    def whole(self, tokens: int, device: torch.device) -> torch.Tensor:
        """The mask, (tokens, tokens), which the layers of a forward share."""
        if self.mask is None:
            rows, columns = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)
            self.mask = (columns <= rows) & (columns > rows - self.reach)
        return self.mask


def _mask(*args: Any, **named: Any) -> torch.Tensor | None:
    """Mask that layers are given in the place of transformers' own, of this rank's tokens; None for all tokens before."""
    from transformers.masking_utils import causal_mask_function as causal

    rule, size = named["mask_function"], named.get("local_size")
    if rule is causal and named["allow_is_causal_skip"]:
        return None
    parts = [
        part for cell in rule.__closure__ or () for part in cell.cell_contents if isinstance(cell.cell_contents, tuple)
    ]
    others = [part.__qualname__.partition(".")[0] for part in parts if part is not causal]
    if size is None or len(parts) != 2 or others != ["sliding_window_overlay"] or not named["allow_is_causal_skip"]:
        raise NotDivisible("its attention is not causal over all tokens or a window of them")
    window = torch.empty(0, dtype=torch.bool).as_subclass(_Window)
    window.reach = size
    return window


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: (batch, heads, tokens, head size); the result is (batch, tokens, heads, size)."""
    window = attention_mask if isinstance(attention_mask, _Window) else None
    asked = [
        name for name, value in named.items() if name not in _PASSED and (isinstance(value, torch.Tensor) or value)
    ]
    asked += ["a mask"] * (attention_mask is not window) + ["dropout"] * (dropout > 0)
    asked += ["a window without a mask"] * (window is None and named.get("sliding_window") is not None)
    asked += ["other keys"] * (key.shape[2] != query.shape[2])
    if asked and query.is_meta:
        raise NotDivisible(f"its attention has {asked[0]}")
    if asked:
        raise UsageError(f"with cp attention has no {asked[0]}; {type(module).__name__} asks for it")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _attends[module](q, k, v, scaling, causal, window), None


def _with_loss(model: nn.Module) -> nn.Module:
    """The module whose `loss_function` the model's loss is."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    for module in model.modules():
        if isinstance(getattr(type(module), "loss_function", None), property):
            whole: Any = module
            if whole.loss_function is ForCausalLMLoss:
                return module
            break
    raise UsageError(f"{type(model).__name__} has no loss of a causal language model, which cp divides; use tp and pp")


@contextlib.contextmanager
def _loss_of(lm: Any, loss: Callable[..., Any]) -> Iterator[None]:
    """Gives a model another loss function for the block."""
    attribute = "_loss_function"
    before = {attribute: vars(lm)[attribute]} if attribute in vars(lm) else {}
    lm.loss_function = loss
    try:
        yield
    finally:
        del vars(lm)[attribute]
        vars(lm).update(before)


def _accepts(model: nn.Module) -> Callable[[str], bool]:
    accepted = inspect.signature(model.forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    return lambda name: takes_any or name in accepted
