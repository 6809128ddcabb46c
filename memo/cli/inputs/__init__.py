"""Flags that several commands share: the model, the step, its sequences."""
