"""The page of a running job: a follower of trace files that grow, and the server of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.trace.live.follow import Follower as Follower
    from memo.trace.live.server import LiveServer as LiveServer
else:
    __getattr__, __dir__, __all__ = attach(__name__)
