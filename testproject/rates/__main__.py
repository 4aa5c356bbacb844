"""``python -m testproject.rates``."""

import sys

from testproject.rates.race import main

if __name__ == "__main__":
    sys.exit(main())
