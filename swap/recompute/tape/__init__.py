"""The tape: one forward recorded operator by operator, what is kept of it, and what backward replays of it."""
