"""Files in, files out: models are read from folders or the Hugging Face Hub, and converted.

`load` finds a `ModelFolder` by path or name (or by `hub`), checks its files and reads them;
`convert` writes one. Nothing that a file claims is believed before it is checked. Imports
`tokenizers`, `kernels` (which speed up what `load` made), `models` and the packages below them.
"""

from .conversion import convert
from .dequantizing import loaded_size
from .hub import Download, announce_downloads, find_cached, or_nearest
from .inspection import Listed, as_listing, inspect, list_models
from .loading import DTYPES, as_dtype, default_type_of, load, locate, read_tokenizer
from .model_folder import (
    ModelFolder,
    find_folder,
    how_to_convert,
    model_folders,
    model_name,
    name_of_folder,
    named_draft,
    new_folder,
)
from .registered import Family
from .sentence_modules import (
    POOLINGS,
    SentenceModules,
    encoder_folder,
    encodes_alone,
    read_sentence_modules,
)
from .t5 import open_checkpoint
from .t5_draft import load_draft, save_draft
from .tasks import KNOWN_SETTINGS, RENAMED_OPTIONS, read_task, settings_as_options
from .tensors import as_mlx, dtype_name
