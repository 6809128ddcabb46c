"""The training run: steps on one or many ranks, cadence, interrupts, metrics."""
