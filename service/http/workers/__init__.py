"""The HTTP side of the inference processes: sends sequences to them, and receives their text."""
