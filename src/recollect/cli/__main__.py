"""`python -m recollect.cli` is `recollect`."""

import sys

from recollect.cli import main

sys.exit(main())
