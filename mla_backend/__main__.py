"""`python -m mla_backend` is `mla-backend`, also where only the source tree is on Python's path."""

import sys

from mla_backend.cli import main

sys.exit(main())
