"""The HTTP process's side of the inference processes: sequences, what they may hold, and the client."""
