"""`python -m relive` is `relive`."""

import sys

from relive.cli import main

sys.exit(main())
