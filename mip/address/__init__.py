"""Address planning: buffers with lifetimes and sizes go in, offsets come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.address.checker import check as check, require_valid as require_valid
    from memo.mip.address.files import (
        plan_to_csv as plan_to_csv,
        plan_to_json as plan_to_json,
        problem_to_csv as problem_to_csv,
        problem_to_json as problem_to_json,
        read_plan as read_plan,
        read_problem as read_problem,
        write_file as write_file,
    )
    from memo.mip.address.lower_bound import peak as peak
    from memo.mip.address.problem import (
        DEVICE as DEVICE,
        AddressPlan as AddressPlan,
        AddressProblem as AddressProblem,
        Buffer as Buffer,
    )
    from memo.mip.address.solver import Method as Method, Progress as Progress, solve as solve
else:
    __getattr__, __dir__, __all__ = attach(__name__)
