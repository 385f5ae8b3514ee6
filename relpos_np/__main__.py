"""Run the command line as ``python -m relpos_np``."""

from relpos_np._commands.main import main

raise SystemExit(main())
