"""`memo doctor` as one rank, with the arguments given."""

from __future__ import annotations

import sys

from memo.cli.main import main

sys.exit(main(["doctor", *sys.argv[1:]]))
