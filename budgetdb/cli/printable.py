"""Text from a database or a file, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""`text` with every character that could move a cursor, change colours or reverse a line written as an escape.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in text
    )
