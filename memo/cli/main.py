"""The `memo` command: finds the subcommand, runs it, turns errors into one line and an exit code.

Subcommand modules are imported only when their name is given, so `memo --help` and the commands that need no torch stay
quick and run without it. A subcommand module has `configure(parser)` and `run(args) -> ExitCode | int`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from memo import __version__
from memo.cli import streams
from memo.errors import ExitCode, MemoError, UsageError

__all__ = ["main"]

# name -> (module, one line of help). The order is the order of a person's day.
COMMANDS = {
    "train": ("memo.cli.train", "train the GPT on text, its activations in memory, on host or on disk"),
    "record": ("memo.cli.record", "what one training step allocates, without a GPU and without its memory"),
    "pack": ("memo.cli.pack", "place buffers with lifetimes in the smallest arena"),
    "check": ("memo.cli.check", "check a plan against every rule"),
    "show": ("memo.cli.show", "show a plan as a table"),
    "profile": ("memo.cli.profile", "measure what each layer saves, computes and repeats"),
    "plan": ("memo.cli.plan", "decide what is kept, moved and recomputed, before anything runs"),
    "simulate": ("memo.cli.simulate", "play a step under an activation plan, with no GPU"),
    "trace": ("memo.cli.trace", "statistics and pictures of a trace"),
    "doctor": ("memo.cli.doctor", "what this machine can do: GPU links, host memory, disks"),
}


# How long a rank leaves the first one alone to say what both found: a process starts within seconds of another.
_PATIENCE_S = 20.0


def _leave_it_to_the_first_rank() -> None:
    """Of ranks that were started with the same arguments the first of each node says what is wrong with them.

    The launcher ends the others as soon as it has. One that it leaves alive has arguments of its own, and speaks. Ranks
    that have met already do not wait: the others learn of an error by the end of its process.
    """
    distributed = sys.modules.get("torch.distributed")
    if os.environ.get("LOCAL_RANK", "0") != "0" and not (distributed and distributed.is_initialized()):
        time.sleep(_PATIENCE_S)


class _Parser(argparse.ArgumentParser):
    """One line on stderr for a usage error, not the whole usage text."""

    def error(self, message: str) -> NoReturn:
        _leave_it_to_the_first_rank()
        self.exit(ExitCode.USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: memo COMMAND ...",
            "",
            __doc_line__,
            "",
            "commands:",
            *lines,
            "",
            "memo COMMAND --help tells more.",
        ]
    )


__doc_line__ = "Activation memory for training transformers: keep, swap, recompute, planned."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code. Never lets a MemoError or a Ctrl-C become a traceback."""
    if argv is None:
        streams.prepare()
    args = list(sys.argv[1:] if argv is None else argv)
    who = f"memo {args[0]}" if args and args[0] in COMMANDS else "memo"
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # rich's way with a pipe that nobody reads
        return ExitCode.OK if isinstance(stop.__context__, BrokenPipeError) else int(stop.code or 0)
    except MemoError as error:
        if isinstance(error, UsageError):
            _leave_it_to_the_first_rank()
        message = " ".join(str(error).split())
        print(f"{who}: {message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{who}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `memo ... | head`
        streams.abandon_stdout()
        return ExitCode.OK
    except OSError as error:
        if not streams.is_full(error):
            raise
        streams.abandon_stdout()
        print(f"{who}: cannot write: {error.strerror}", file=sys.stderr)
        return ExitCode.FAILURE


def _run(args: Sequence[str]) -> int:
    """The subcommand's exit code, or that of the overview."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return ExitCode.OK if args else ExitCode.USAGE
    name = args[0]
    if name in ("-V", "--version"):
        print(f"memo {__version__}")
        return ExitCode.OK
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}; one of {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[name][0])
    parser = _Parser(prog=f"memo {name}", description=COMMANDS[name][1])
    module.configure(parser)
    try:
        parsed = parser.parse_args(args[1:])
    except SystemExit as stop:  # --help and usage errors
        return int(stop.code or 0)
    return int(module.run(parsed))


if __name__ == "__main__":
    sys.exit(main())
