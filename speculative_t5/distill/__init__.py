"""`distill`: trains a draft for a T5 from prompts alone.

It goes by stages, each of which a killed run resumes to the same bytes: `data` reads the prompts
and sets some aside, `labels` has the target label them, `judging` measures on those set aside what
the draft gives. Imports `bench` and the rooms below it and, for plots only, matplotlib.
"""

from .agreement import Agreement
from .data import Data, Example, read_data
from .judgement import Judgement, Speed
from .judging import judge
from .labels import Label, LabelFile, label
from .plot import draw
