"""The `memo` command: runs a subcommand, and turns errors into one line on standard error and an exit code.

Subcommand modules are imported only when their name is given, so `memo --help` and the commands that need no torch stay
quick and run without it. A subcommand module has `run(args) -> ExitCode | int`, and one of two: `Options`, a dataclass whose
fields are the flags, of which `run` takes one; or `configure(parser)`, and `run` takes what argparse makes. With both,
`configure` adds the flags of `Options`. `EPILOG` is the end of its help.

Standard streams may be closed, full, read by nobody, or limited to few characters. Invariant: whatever happens to standard
output, a command ends with an exit code and at most one line on standard error, never in a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from memo import __version__
from memo.errors import ExitCode, MemoError, UsageError

# name -> (module, one line of help), in the order in which they are used.
COMMANDS = {
    "train": ("memo.cli.train", "train a GPT on text, with activations on the GPU, in host memory or on disk"),
    "record": ("memo.cli.record", "record the memory allocations of one training step, without a GPU"),
    "pack": ("memo.cli.pack", "assign addresses to buffers with lifetimes, in the smallest arena"),
    "check": ("memo.cli.check", "check a plan against every rule"),
    "show": ("memo.cli.show", "show a plan as a table"),
    "profile": ("memo.cli.profile", "measure the saved bytes and the compute time of each layer"),
    "explain-oom": ("memo.cli.explain_oom", "say why memory ran out, from a trace or a snapshot of torch's memory"),
    "plan": ("memo.cli.plan", "plan which activations are kept, offloaded and recomputed, without a GPU"),
    "simulate": ("memo.cli.simulate", "simulate one training step under an activation plan, without a GPU"),
    "rehearse": (
        "memo.cli.rehearse",
        "run the first steps of a training on a simulated GPU, by the code that would run there",
    ),
    "dry-run": ("memo.cli.dry_run", "run a step of every rank of a plan's layout in one process, without GPUs"),
    "trace": ("memo.cli.trace", "report, draw and compare traces of training runs"),
    "doctor": ("memo.cli.doctor", "measure this machine's GPU links, host memory and disks"),
}
WITH_SUBCOMMANDS = ("trace",)
_ABOUT = "Activation memory manager for training transformers: keeps, moves or recomputes activations by a plan."

_MANY_OBJECTS = 50_000
"""New objects after which garbage is collected while planning, which makes many and few cycles; at 700 that is a sixth of
its time."""
_LONGEST_MESSAGE = 2000
"""Characters of a message; it names files, and words of theirs."""
# A later rank waits so long for the first rank of its node to report an error that both found.
_FIRST_RANK_S = 20.0


def _wait_for_first_rank() -> None:
    """Lets the first rank of the node report a usage error alone.

    The launcher ends the other ranks as soon as the first one exits. A rank that is still alive after the wait has an error
    of its own, and reports it. Ranks of a process group do not wait: the group ends with the first process that fails.
    """
    distributed = sys.modules.get("torch.distributed")
    if os.environ.get("LOCAL_RANK", "0") != "0" and not (distributed and distributed.is_initialized()):
        time.sleep(_FIRST_RANK_S)


_RENAMED = {
    "train": {"--device-budget": "--device", "--host-budget": "--host", "--disk-dir": "--disk"},
    "plan": {"--nvme": "--disk-budget", "--loss": "--loss-without-logits (leave it out for the model's own loss)"},
    "doctor": {"--disk-dir": "--disk"},
    "profile": {"--disk-dir": "--disk"},
    "rehearse": {"--disk": "--disk-space"},
    "trace": {"'png'": "html, whose page has the picture"},
}
"""Former names of a command's flags and subcommands, of which an error tells the new one."""


USAGE = {
    "train": ("--model NAME --seq TOKENS --data PATH", "--model tiny --seq 4k --data texts/ --steps 20"),
    "record": ("--model NAME --seq TOKENS -o FILE", "--model 7b --seq 32k --alpha 0.25 -o trace.csv"),
    "pack": ("FILE -o FILE", "trace.csv -o plan.json"),
    "check": ("FILE", "plan.json"),
    "show": ("FILE", "plan.json"),
    "profile": ("--model NAME --seq TOKENS -o FILE", "--model tiny --seq 2k -o profile.json"),
    "explain-oom": ("FILE", "trace.rank0.jsonl"),
    "plan": ("--model NAME --seq TOKENS --gpu NAME", "--model llama-3-8b --lora 16 --seq 32k --gpu h100"),
    "simulate": ("FILE", "plan.json -o trace.jsonl"),
    "rehearse": ("--model NAME --seq TOKENS --gpu NAME", "--model llama-3-8b --lora 16 --seq 32k --gpu h100"),
    "dry-run": ("FILE", "plan.json"),
    "trace stats": ("FILE ...", "trace.rank*.jsonl"),
    "trace html": ("FILE ... -o FILE", "trace.rank*.jsonl -o trace.html"),
    "trace chrome": ("FILE ... -o FILE", "trace.rank*.jsonl -o trace.json.gz"),
    "trace diff": ("FILE FILE", "before.jsonl after.jsonl"),
    "doctor": ("--disk DIR", "--disk /tmp"),
}
"""Arguments that the help of a command begins with, and those of its example."""


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line on stderr, without the usage text; flags are written whole."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def format_help(self) -> str:
        """The help, which begins with a short usage and an example instead of every flag."""
        if (found := USAGE.get(self.prog.removeprefix("memo "))) is not None:
            self.usage = f"{self.prog} {found[0]} [options]\nexample: {self.prog} {found[1]}"
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments; a subcommand's parser, which argparse calls in this way, names its own flags."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
            flags = re.findall(r"(?<![\w-])--?\w[\w-]*", super().format_help())
            self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *_meant(flag, flags)]))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        _wait_for_first_rank()
        words = [word.partition("=")[0] for word in message.split()]
        renamed = _RENAMED.get(self.prog.rpartition(" ")[2], {})
        wrong = re.match(r"argument (\w+(?:\|\w+)+): invalid choice: ('.*?') \(", message)  # of a subcommand
        if wrong is not None:
            known = wrong[1].split("|")
            instead = _meant(wrong[2][1:-1], known, shown=repr) or ["give one of them"]
            message = f"{wrong[2]} is none of {', '.join(known)}; {instead[0]}"
        message = next((f"{word} is now {renamed[word]}" for word in words if word in renamed), message)
        self.exit(ExitCode.USAGE, f"{self.prog}: {_inert(message)} (see {self.prog} --help)\n")


def _meant(word: str, known: Iterable[str], *, shown: Callable[[str], str] = str) -> list[str]:
    """Question whether the known word nearest to this one was meant; none where nothing is near."""
    return [f"did you mean {shown(near)}?" for near in difflib.get_close_matches(word, known, n=1)]


def _inert(message: object) -> str:
    """A message in one line of bounded length, in which a file's words cannot act on a terminal."""
    from memo.trace import printable

    return printable(" ".join(str(message).split()), limit=_LONGEST_MESSAGE)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: memo COMMAND ...",
            "",
            _ABOUT,
            "",
            "commands:",
            *lines,
            "",
            "memo COMMAND --help shows the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code.

    Args:
        argv: the command line without the program's name; None takes it from `sys.argv`, and prepares standard streams.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _prepare_streams()
        if args[:1] == ["plan"]:
            gc.set_threshold(_MANY_OBJECTS)
    who = _name_of(args)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse's
        return ExitCode.OK if isinstance(stop.__context__, BrokenPipeError) else int(stop.code or 0)
    except MemoError as error:
        if isinstance(error, UsageError):
            _wait_for_first_rank()
        print(f"{who}: {_inert(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("; ".join(filter(None, (f"{who}: interrupted", _inert(interrupt)))), file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `memo ... | head`
        _discard_stdout()
        return ExitCode.OK
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _discard_stdout()
        print(f"{who}: cannot write: {error.strerror}", file=sys.stderr)
        return ExitCode.FAILURE


def _name_of(args: Sequence[str]) -> str:
    """Name of the command that messages begin with, with its subcommand."""
    if not args or args[0] not in COMMANDS:
        return "memo"
    has_subcommand = args[0] in WITH_SUBCOMMANDS and len(args) > 1 and args[1].isalpha()
    return " ".join(["memo", *args[: 1 + has_subcommand]])


def _run(args: Sequence[str]) -> int:
    """Runs the subcommand, or prints the overview or the version."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return ExitCode.OK if args else ExitCode.USAGE
    name = args[0]
    if name in ("-V", "--version"):
        print(f"memo {__version__}")
        return ExitCode.OK
    if name not in COMMANDS:
        instead = _meant(name, COMMANDS, shown=repr) or [f"choose one of {', '.join(COMMANDS)}"]
        raise UsageError(f"unknown command {name!r}; {instead[0]}")
    from memo.cli.inputs.fields import add_fields, parsed

    module = importlib.import_module(COMMANDS[name][0])
    about = COMMANDS[name][1]
    parser = _Parser(prog=f"memo {name}", description=f"{about[0].upper()}{about[1:]}.")
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, getattr(module, "EPILOG", None)
    options: Any = getattr(module, "Options", None)
    if hasattr(module, "configure"):
        module.configure(parser)
    else:
        add_fields(parser, options)
    try:
        flags = parser.parse_args(args[1:])
    except SystemExit as stop:  # --help and usage errors
        return int(stop.code or 0)
    return int(module.run(flags if options is None else parsed(options, flags)))


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, or no larger file allowed


def _prepare_streams() -> None:
    """Opens closed standard streams on /dev/null, and writes characters that a terminal lacks as question marks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # `memo ... >&-`: the next file to be opened would get its number
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115  # until the process ends
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_stdout() -> None:
    """Sends buffered output to /dev/null, so that the interpreter does not fail on it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
