"""Progress of a run: one line of text per step, and on a terminal a progress bar below the lines."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressBar:
    """Prints lines, and inside its `with` block shows a bar where standard output is a terminal.

    Args:
        done: steps done before this run.
        steps: steps of the whole run.
        quiet: print nothing, as on all ranks but the first.
    """

    def __init__(self, *, done: int, steps: int, quiet: bool = False) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True, quiet=quiet)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("training", total=steps, completed=done)

    @property
    def has_bar(self) -> bool:
        """True on a terminal, where the bar shows the time."""
        return self._bar is not None

    def line(self, text: str) -> None:
        """Prints and flushes one line."""
        self._console.print(text)
        self._console.file.flush()

    def advance(self) -> None:
        """Advances the bar by one step."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
