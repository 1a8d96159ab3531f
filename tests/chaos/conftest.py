"""Put the folder on the path: the modules of the chaos suite are also programs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
