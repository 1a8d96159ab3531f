"""The modules of this folder import each other by name; none of the names may be one of the standard library's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
