"""Address planning on pure data: buffers with lifetimes and sizes go in, offsets come out. Imports no torch.

Read `buffers.py` for the nouns and `solve.py` for the one call; `check.py` is what makes the answers trustworthy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.compile_cpp import build as build
    from memo.mip.strict_json import STDIN as STDIN, encode as encode
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "compile_cpp": "build",
            "strict_json": "STDIN encode",
        },
    )
