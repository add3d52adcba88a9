"""Files in, files out: models are read from folders or the Hugging Face Hub, and converted.

`load` finds a model by path or name (`places`, `hub`), checks its files and reads them: a T5 by
`t5`, a decoder-only model by `causal`. `convert` writes a T5 as a model folder, one tensor at a
time. Below them, `folder` knows Hugging Face's files, and `tensors`, `npz` and `torch_bin` the
formats of weights; nothing that a file claims is believed before it is checked. Imports
`tokenizers`, `cpu` (which speeds up what `load` made), `models` and the rooms below them.
"""

from .causal import inspect_causal
from .conversion import Observer, convert
from .digests import digest_of
from .folder import read_json
from .hub import find_cached
from .inspection import Listed, as_lines, inspect, list_models
from .loading import DTYPES, as_dtype, holds_causal, load, locate
from .places import (
    convert_command,
    find_folder,
    is_draft,
    model_folders,
    name_of_folder,
    named_draft,
    new_folder,
    weights_folders,
)
from .sharing import holds_draft, inspect_draft, load_draft, save_draft, target_name
from .t5 import open_checkpoint
from .tasks import RENAMED, Task, read_task
from .tensors import dtype_name
from .writing import lock
