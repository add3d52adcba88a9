"""The command line: the only package that prints, except for a progress bar on request.

`main` has the default command and `convert`; `batch` (with `job`), `bench`, `distill`,
`document`, `doctor`, `models`, `repl` and `serve` are the others. `options` holds what they share,
`terminal` what they say and how they end. May import every other package.
"""

from .main import convert_main, main
