"""Search over layouts of a cluster: parallelism, schedule, sharding and microbatches, each with its activation plan.

Where to begin: space.py for what is searched, search.py for the call, bounds.py for why its answer can be trusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.search.answer import Item as Item, Rival as Rival, rivals as rivals, step_items as step_items
    from memo.search.bounds import Bound as Bound
    from memo.search.candidates import Candidate as Candidate, Setting as Setting, Shape as Shape
    from memo.search.launch import (
        Launch as Launch,
        finetune_arguments as finetune_arguments,
        launch_of as launch_of,
        runs_under_memo_train as runs_under_memo_train,
        runs_under_parallelize as runs_under_parallelize,
        why_not_finetuned as why_not_finetuned,
        why_not_trained as why_not_trained,
        with_run as with_run,
    )
    from memo.search.longest import (
        LongestFit as LongestFit,
        last_that_fits as last_that_fits,
        longest_that_fits as longest_that_fits,
    )
    from memo.search.request import Request as Request
    from memo.search.search import (
        Closed as Closed,
        Found as Found,
        Planned as Planned,
        search_layouts as search_layouts,
    )
    from memo.search.shares import Shares as Shares
    from memo.search.smallest import Smallest as Smallest, smallest_that_fits as smallest_that_fits
    from memo.search.space import (
        DIMENSIONS as DIMENSIONS,
        MOST_PLACEMENTS as MOST_PLACEMENTS,
        Space as Space,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
