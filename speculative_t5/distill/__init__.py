"""Drafts for a target of one's own: labelling, training and judging.

Imports `bench` and the rooms below it and, for plots only, matplotlib.
"""

from .agreement import Agreement
