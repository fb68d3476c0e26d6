"""`python -m qdc`."""

import sys

from qdc.cli import main

sys.exit(main())
