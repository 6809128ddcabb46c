"""The `memo` command: one file per subcommand."""
