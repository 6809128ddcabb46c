"""Errors of a user's step as one line: what was raised, and where in the user's code."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from memo.allocator import is_users, place
from memo.errors import MemoError, RecordError

_LONGEST = 300
_RESIZES = "resize storage that is not resizable"


@contextlib.contextmanager
def users_errors() -> Iterator[None]:
    """Turns exceptions into RecordError, whose cause is the exception; memo's own pass through."""
    try:
        yield
    except MemoError:
        raise
    except Exception as error:
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        theirs = [place(code, line) for code, line in frames if is_users(code)]
        at = f" at {theirs[-1]}" if theirs else ""
        if _RESIZES in str(error):
            raise RecordError(
                f"the step resizes a tensor's storage{at}, as fully_shard does: record the model without fully_shard, or "
                "with real tensors (--real)"
            ) from error
        text = " ".join(str(error).split())
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        raise RecordError(f"the step raised {type(error).__name__}{at}: {text}") from error
