"""`python -m apportion` is the `apportion` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
