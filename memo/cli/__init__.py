"""The `memo` command: one file per subcommand."""

import sys

from memo.installation import conflict

if not hasattr(sys.modules["memo"], "_HERE"):
    raise SystemExit(f"memo: {conflict()}")
