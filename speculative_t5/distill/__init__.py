"""`distill`: trains a draft for a T5 or T5Gemma from prompts alone.

A run has three stages; each resumes after a kill and gives the same bytes. **Label**: the target
generates outputs for the prompts, of which some are held out. **Train**: a draft that shares the
target's encoder, embedding and head learns them. **Judge**: the draft's agreement with the target
and its speed on the held-out prompts are measured and written beside its weights. Imports `measure`
and the packages below it.
"""

from .data import Data, Example, read_data, reasons
from .judgement import DistillTask, Judgement, Speed, fastest, judge
from .labels import Label, label
from .run import RunFolder, StageProgress, check_fit, distill, new_draft, refuse_existing
from .training import LOSSES, Agreement, DistillOptions, own_parameters
