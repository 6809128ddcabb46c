"""Planning while a program trains: measures its own steps, solves, and applies the plan between two steps."""
