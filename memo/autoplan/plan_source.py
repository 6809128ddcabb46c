"""Sources of a manager's plan, asked at each forward: AutoPlan plans; memo.manager has sources of given plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memo.autoplan.plan_outcome import PlanOutcome
    from memo.mip.activation import ActivationPlan


class PlanSource:
    """Decides which plan is in use: here none. Plans change only between steps."""

    @property
    def plan(self) -> ActivationPlan | None:
        """The plan in use."""
        return None

    def before_forward(self, *, may_end: bool = True) -> None:
        """Called before each forward of the model.

        Args:
            may_end: the step before it may have ended; False between microbatches whose gradients are accumulated.
        """

    def before_layer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called before each forward of a layer, with its arguments."""

    def after_forward(self) -> None:
        """Called after each forward that raised nothing.

        Raises:
            Infeasible: the device's budget is too small for any plan.
        """

    def outcome(self) -> PlanOutcome | None:
        """Returns the state of planning for a report."""
        return None
