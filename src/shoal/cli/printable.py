"""Text from files on a terminal: what it shows is letters, whatever somebody else wrote."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """Give a text with every sign that is not printed as its escape, such as `\\x1b`.

    Escape sequences could move the cursor, rename the window or hide what follows, and signs of
    direction turn a name round. `keep` are signs that stay, such as the ends of lines.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
