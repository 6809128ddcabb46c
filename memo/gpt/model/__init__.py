"""The GPT: its layers, attention, pipeline stages, and one rank's part of it."""
