"""The command line: the only package that prints, except for a progress bar on request.

All commands start in `main`, which has a table of their names and imports the one that is called.
What they share is in `options` and `terminal`. May import every other package.
"""

from .main import convert_main, main
