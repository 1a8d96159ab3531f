"""`python -m retriever.indexing`."""

import sys

from retriever.indexing.cli import main

sys.exit(main())
