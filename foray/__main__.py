"""`python -m foray`: the same as the `foray` command."""

import sys

from foray.cli import main

sys.exit(main())
