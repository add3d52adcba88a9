"""`distill`: trains a draft for a T5 from prompts alone.

A run (`run`) goes by stages, each of which goes on after a kill to the same bytes. `data` reads the
prompts and holds some out. **Label**: the target generates outputs for them (`labels`). **Train**:
a draft that shares the target's encoder, embedding and head learns them (`training`, with
`batches` and `losses`). **Judge**: what the draft gives on the held-out prompts is counted
(`agreement`) and measured (`judging`), and written beside its weights (`judgement`). `folder` keeps
what a run needs to go on. Imports `bench` and the rooms below it and, for plots only, matplotlib.
"""

from .agreement import Agreement
from .data import Data, Example, read_data
from .folder import RunFolder
from .judgement import Judgement, Speed, fastest
from .judging import judge
from .labels import Label, LabelFile, label
from .losses import LOSSES
from .memory import own_parameters, training_memory
from .options import DEFAULT_STEPS, DistillOptions
from .plot import draw
from .run import Observer, Subject, check_options, check_output, distill, new_draft
