"""`doctor`: checks that prove, on the machine they run on, what the package promises.

`checks` names them all; `environment`, `arithmetic`, `rows`, `outputs`, `sampling` and `speed` have
them by kind, and `running` runs each in a process of its own. A check takes a `Subject` and returns
a `Finding`. Imports `bench` and the rooms below it.
"""

from .checks import CHECKS, Check, chosen
from .findings import Finding, Status, Subject
from .running import run
