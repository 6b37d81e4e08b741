"""The engine in docs/add-an-engine.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/add-an-engine.md"
[_code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
exec(_code, globals())  # our own document
