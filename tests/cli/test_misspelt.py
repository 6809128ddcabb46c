"""A misspelt command or flag is told with the nearest one, in one line."""

from __future__ import annotations

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

MISSPELT = {
    "trian --model tiny": "memo: unknown command 'trian'; did you mean 'train'?",
    "rehearse --model qwen3-8b --sequence 32k": "memo rehearse: unrecognized arguments: --sequence 32k; did you mean --seq?",
    "rehearse --model qwen3-8b --loss-without-logit": "--loss-without-logit; did you mean --loss-without-logits?",
    "train --step=4": "memo train: unrecognized arguments: --step=4; did you mean --steps?",
    "pack step.csv --outptu plan.json": "unrecognized arguments: --outptu plan.json; did you mean --output?",
    "trace stat x.jsonl": "memo trace: 'stat' is none of stats, html, diff, chrome; did you mean 'stats'?",
    "trace stats x.jsonl --jsn": "memo trace stats: unrecognized arguments: --jsn; did you mean --json?",
}
STRANGE = {
    "xyzzy": "memo: unknown command 'xyzzy'; choose one of train, record, ",
    "train --no-such-flag": "memo train: unrecognized arguments: --no-such-flag (see memo train --help)",
    "trace xyzzy": "'xyzzy' is none of stats, html, diff, chrome; give one of them (see",
}


@pytest.mark.parametrize(("line", "said"), [*MISSPELT.items(), *STRANGE.items()], ids=[*MISSPELT, *STRANGE])
def test_a_misspelt_word_is_told_with_the_nearest_one(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
