"""Scripts that measure. `python -m benchmarks` lists them; each prints a table and may write a dated JSON file."""
