"""`distill`: trains a draft for a T5 from prompts alone.

A run (`run`) has three stages; each resumes after a kill and gives the same bytes. `data` reads the
prompts and holds some out. **Label**: the target generates outputs for them (`labels`). **Train**:
a draft that shares the target's encoder, embedding and head learns them (`training`, with
`batches` and `losses`). **Judge**: the draft's agreement and speed on the held-out prompts are
counted (`agreement`) and measured (`judging`), and written beside its weights (`judgement`).
`folder` keeps all that a run needs to resume, and `budget` its time. Imports `bench` and the rooms
below it and, for plots only, matplotlib.
"""

from .agreement import Agreement
from .data import Data, Example, read_data, reasons
from .folder import RunFolder
from .judgement import Judgement, Speed, fastest
from .judging import judge
from .labels import Label, LabelFile, label
from .losses import LOSSES
from .memory import own_parameters, training_memory
from .options import DEFAULT_STEPS, DistillOptions
from .plot import draw
from .run import Observer, Subject, check_options, check_output, distill, new_draft
