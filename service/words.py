"""Words in messages for people."""


def plural(count: int, noun: str) -> str:
    """1 sequence, 2 sequences."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shortened(value: object) -> str:
    """Show a value that a user gave, in at most about 100 characters."""
    try:
        text = repr(value[:101] if isinstance(value, str | list) else value)
    except RecursionError:  # as deep as can be decoded
        return "what is nested too deeply to be shown"
    return text if len(text) <= 100 else text[:100] + "…"
