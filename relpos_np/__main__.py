"""Run the command line as ``python -m relpos_np``."""

from relpos_np.cli import main

raise SystemExit(main())
