"""The command line: the only room that prints."""

from .main import convert_main, main

__all__ = [
    "convert_main",
    "main",
]
