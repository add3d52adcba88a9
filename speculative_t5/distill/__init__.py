"""`distill`: trains a draft for a T5 from prompts alone.

A run (`run`) has three stages; each resumes after a kill and gives the same bytes. `data` reads the
prompts and holds some out. **Label**: the target generates outputs for them (`labels`). **Train**:
a draft that shares the target's encoder, embedding and head learns them (`training`). **Judge**:
the draft's agreement with the target and its speed on the held-out prompts are measured and written
beside its weights (`judgement`). `folder` keeps all that a run needs to resume, and its time.
Imports `bench` and the packages below it.
"""

from .data import Data, Example, Label, read_data, reasons
from .folder import RunFolder
from .judgement import Judgement, Speed, Task, fastest, judge
from .labels import LabelFile, label
from .run import Observer, check_options, check_output, distill, new_draft
from .training import LOSSES, Agreement, DistillOptions, own_parameters, training_memory
