"""The command: every public file but ``app`` is one of its subcommands."""
