"""The script beside this file is shared with a process of its own, so it is imported by name in both."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
