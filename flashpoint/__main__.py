"""``python -m flashpoint``: the same as the console script ``flashpoint``."""

import sys

from flashpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
