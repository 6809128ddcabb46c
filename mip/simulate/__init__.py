"""A step played under an activation plan, with no GPU."""
