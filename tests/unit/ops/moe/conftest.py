"""The scripts beside this file are shared with processes of their own, so they are imported by name in both."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
