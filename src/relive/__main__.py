"""Runs the command line: `python -m relive` is the same as `relive`."""

import sys

from relive.cli import main

sys.exit(main())
