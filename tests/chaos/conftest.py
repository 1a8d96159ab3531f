"""The chaos suite's modules are beside its tests: they are programs too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
