"""`python -m retriever`."""

import sys

from retriever.cli import main

sys.exit(main())
