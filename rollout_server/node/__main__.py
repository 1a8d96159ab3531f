"""`python -m rollout_server.node`."""

import sys

from rollout_server.node.cli import main

sys.exit(main())
