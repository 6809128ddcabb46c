"""`memo.loss_without_logits`: a Hugging Face model's own loss, computed by its own forward without its logits.

Owns the changes to the model, and reverts them: two hooks that detect labels among a forward's arguments, and the
output projection's forward, which then returns deferred logits (memo.loss.deferred_logits). The model's forward, loss
function and parameters stay as they are. Forwards without labels (`generate`, for one) are unchanged.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from memo.errors import UsageError
from memo.loss.deferred_logits import Product, deferred
from memo.parallel import DividedRows
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from types import TracebackType

# Values of `loss_type` whose loss is one cross entropy of all logits; None is the default, the causal one.
_CROSS_ENTROPIES = (None, "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")


def loss_without_logits(
    model: nn.Module, *, chunk: int | None = None, keep_gradients: bool = True
) -> LossWithoutLogits:
    """Makes `model(input_ids, labels=labels).loss` compute a chunk of logits at a time, with or without `memo.offload`.

        memo.loss_without_logits(model)                      # until .close()
        with memo.loss_without_logits(model): ...            # for the block

    The loss stays the model's own: its shift, `num_items_in_batch`, scaled or capped logits, auxiliary losses of experts.
    `outputs.logits` of such a forward is computed when it is read. Where every label is ignored the loss is 0, not nan.
    Forwards without labels are unchanged. See docs/loss.md.

    Args:
        model: a Hugging Face model with an output projection, before or after `memo.parallelize`. Of several wrappers give
            the module that is called: the one that an adapter library returned, before DistributedDataParallel.
        chunk: tokens whose logits exist at a time, as in `memo.linear_cross_entropy`.
        keep_gradients: as in `memo.linear_cross_entropy`.

    Returns:
        A handle whose `close` reverts the model; also a context manager.

    Raises:
        UsageError: the model has no output projection that is a plain nn.Linear, takes no labels, or has another kind of
            loss. The model is then unchanged.
    """
    projection = _projection(model)
    kind = getattr(model, "loss_type", None)
    if kind not in _CROSS_ENTROPIES:
        raise UsageError(f"the loss of {type(model).__name__} ({kind}) is not a cross entropy of its logits")
    signature = inspect.signature(model.forward)
    others = [parameter for parameter in signature.parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    if "labels" not in signature.parameters and not others:
        raise UsageError(f"the forward of {type(model).__name__} takes no labels, so it has no loss to compute")
    return LossWithoutLogits(model, projection, signature, chunk=chunk, keep_gradients=keep_gradients)


def _projection(model: nn.Module) -> nn.Linear:
    name = type(model).__name__
    found = getattr(model, "get_output_embeddings", lambda: None)()
    if found is None:
        raise UsageError(f"{name} has no output projection: get_output_embeddings() gives none")
    own = vars(found).get("forward")
    if isinstance(getattr(own, "__self__", None), LossWithoutLogits):
        raise UsageError(
            f"the loss of {name} is without logits already; leave out this second memo.loss_without_logits"
        )
    if own is not None:
        raise UsageError(
            f"another library has replaced the forward of {name}'s output projection; call memo.loss_without_logits first"
        )
    plain = isinstance(found, nn.Linear) and (
        type(found).forward is nn.Linear.forward or isinstance(found, DividedRows)
    )
    if not plain:
        kind = f"{type(found).__module__}.{type(found).__qualname__}"
        raise UsageError(f"the output projection of {name} is a {kind} with a forward of its own")
    if not _has_its_weight(found):
        raise UsageError(f"the weight of the output projection of {name} is computed, and no parameter of it")
    return cast("nn.Linear", found)


def _has_its_weight(projection: nn.Module) -> bool:
    """False for a parametrized weight, or a view into a flat parameter."""
    return projection._parameters.get("weight") is not None


class LossWithoutLogits:
    """Handle of `loss_without_logits`; `close`, or the end of a `with`, reverts the model."""

    def __init__(
        self,
        model: nn.Module,
        projection: nn.Linear,
        signature: inspect.Signature,
        *,
        chunk: int | None,
        keep_gradients: bool,
    ) -> None:
        self._projection = projection
        self._signature = signature
        self._chunk = chunk
        self._keep_gradients = keep_gradients
        self._with_labels = False
        self._products: list[Product] = []
        self._warned = False
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        projection.forward = self._project  # type: ignore[method-assign, assignment]

    def __enter__(self) -> LossWithoutLogits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Reverts the model. Logits already deferred can still be read. May be called again."""
        for hook in self._hooks:
            hook.remove()
        vars(self._projection).pop("forward", None)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**self._signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        self._with_labels = given.get("labels") is not None

    def _project(self, hidden: Tensor) -> Tensor:
        dtypes = {hidden.dtype, self._projection.weight.dtype}
        alike = len(dtypes) == 1 or torch.is_autocast_enabled(hidden.device.type)
        # Inference tensors have no version counter, so a change before the logits are computed would go unnoticed.
        plain = hidden.is_inference() or hidden.is_meta  # nor is there an autocast without data
        if not self._with_labels or not alike or plain or not _has_its_weight(self._projection):
            return type(self._projection).forward(self._projection, hidden)
        logits = deferred(self._projection, hidden, chunk=self._chunk, keep_gradients=self._keep_gradients)
        self._products.append(logits.product)
        return logits

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._with_labels = False
        computed = any(product.computed for product in self._products)
        self._products.clear()
        if computed and output is not None and not self._warned:  # with an error there is no output
            self._warned = True
            warn_user(
                f"{type(model).__name__} does more with its logits than a cross entropy: they were computed in full, and "
                "memo.loss_without_logits saves nothing",
                UserWarning,
            )
