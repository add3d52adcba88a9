"""The command line: the only room that prints, except for a progress bar on request.

`main` has the default command and `convert`; `batch` (with `job`, `progress`, `division` and
`parts`), `bench`, `distill` (with `config_file`), `doctor`, `models`, `repl` (with
`conversation`) and `serve` are the others. `options` holds what they share, `terminal` how each of
them ends, `together` what changes where several processes run one. May import every other room.
"""

from .main import convert_main, main
