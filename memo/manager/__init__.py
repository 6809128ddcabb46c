"""`memo.offload` and its context manager: arguments, what they open, where plans come from, the report."""
