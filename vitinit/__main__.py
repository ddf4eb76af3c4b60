"""python -m vitinit: the same as the command `vitinit`."""

import sys

from vitinit.cli import main

if __name__ == "__main__":
    sys.exit(main())
