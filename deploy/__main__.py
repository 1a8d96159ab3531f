"""`python -m deploy`: the same as the `foray` command."""

import sys

from deploy.cli import main

sys.exit(main())
