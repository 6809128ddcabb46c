"""Published training runs, predicted: `python -m benchmarks.published`, `make bench ARMS=published`."""
