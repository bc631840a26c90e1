"""`python -m mla_backend` is the command `mla-backend`."""

import sys

from mla_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
