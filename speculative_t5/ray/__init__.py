"""Ray: `Generate` for the batches of Ray Data, and `serve_app` for Ray Serve.

Ray itself is imported by `serve_app` alone, and pyarrow where a batch is one of its tables. Imports
`serve`, `generation`, `checkpoints`, `tables`, `options` and `errors`.
"""

from .data import Generate
from .serving import serve_app
