"""JSON objects as `json.loads` gives them; whoever reads one checks the values that it takes."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
