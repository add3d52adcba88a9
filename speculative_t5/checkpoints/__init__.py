"""Files in, files out: reading and writing models, the Hugging Face Hub, conversion, `load`."""

from .conversion import convert
from .inspection import Listed, as_lines, inspect, list_models
from .loading import DTYPES, as_dtype, load
from .places import convert_command, find_folder, model_folders, named_draft

__all__ = [
    "DTYPES",
    "Listed",
    "as_dtype",
    "as_lines",
    "convert",
    "convert_command",
    "find_folder",
    "inspect",
    "list_models",
    "load",
    "model_folders",
    "named_draft",
]
