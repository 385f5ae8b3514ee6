"""The commands of the command line, one file each.

Each has a SUMMARY, a HELP and an EXAMPLE, says in `arguments` what it takes, and does it in `run`, which returns the
exit code. `relpos_np._commands.main` puts them together.
"""
