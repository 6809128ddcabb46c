"""A pytest plugin: no example has a time limit, and a failed one says how it is drawn again."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine may lack it
    from hypothesis import settings

    settings.register_profile("memo", deadline=None, print_blob=True)
    settings.load_profile("memo")
