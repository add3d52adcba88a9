"""The command line: the only package that prints, except for a progress bar on request.

`main` is where all commands start, and what they share is in `options` and `terminal`. May import
every other package.
"""

from .main import convert_main, main
