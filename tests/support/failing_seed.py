"""A pytest plugin: a failure says of which seed it is, also where a test goes through seeds in a loop."""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        frames = [(entry.frame.code.name, entry.frame.f_locals) for entry in call.excinfo.traceback]
        seeds = [f"{name}: seed = {known['seed']!r}" for name, known in frames if "seed" in known]
        if seeds:
            report.sections.append(("seed", "\n".join(seeds)))
    return report
