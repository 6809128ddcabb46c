"""The tape: records a layer's operators below autograd, and replays those whose results backward needs and no tier has."""
