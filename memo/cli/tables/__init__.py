"""Text tables of what commands print: of plans, simulated steps and traces."""
