"""Words in messages for people."""


def plural(count: int, noun: str) -> str:
    """1 sequence, 2 sequences."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
