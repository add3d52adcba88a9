"""Files in, files out: models are read from folders or the Hugging Face Hub, and converted.

`ModelFolder` is a folder of a model, found by path or name (or by `hub`); `load` checks its files
and reads them: a T5 by `t5`, a draft that shares its target's encoder by `t5_draft`, any other by
`decoder_only`. `convert` writes a T5 as a model folder, one tensor at a time. Below them, `tensors`
and `torch_bin` know the formats of weights; nothing that a file claims is believed before it is
checked. Imports `tokenizers`, `cpu` (which speeds up what `load` made), `models` and the
packages below them.
"""

from .conversion import convert
from .decoder_only import inspect_decoder_only
from .hub import find_cached
from .inspection import Listed, as_lines, inspect, list_models
from .loading import DTYPES, as_dtype, load, locate
from .model_folder import (
    ModelFolder,
    convert_command,
    find_folder,
    model_folders,
    name_of_folder,
    named_draft,
    new_folder,
    read_json,
    weights_folders,
)
from .t5 import open_checkpoint
from .t5_draft import load_draft, save_draft
from .tasks import RENAMED, read_task
from .tensors import dtype_name
