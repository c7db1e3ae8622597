"""How answers are written: their forms, JSON in parts, streams."""
