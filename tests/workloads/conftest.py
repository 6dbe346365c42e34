"""The small models are those of tests/models."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
