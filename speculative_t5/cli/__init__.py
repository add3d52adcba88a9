"""The command line, the only room that prints: one file per command.

It may import every other room.
"""

from .main import convert_main, main
