"""What a user names on the command line: a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast_cli.errors import UserError


def text_of(file: str) -> str:
    """Return the file's text, that of standard input for -. Raises UserError."""
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}; name a file of JSON, or - for standard input") from error
