"""The options of a decoder in a worker of Ray: what they may be, and how they get there."""

from dataclasses import dataclass, fields
from typing import Any

from ..checkpoints import as_dtype, dtype_name
from ..generation import LoadingOptions
from ..options import OptionError, settle


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(LoadingOptions):
    """The options of `SpeculativeDecoder.from_pretrained` in another process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None:
            raise OptionError(
                "{group} splits a model, and each worker has a whole one: leave it out"
            )
        if (dtype := as_dtype(self.dtype)) is not None:
            settle(self, dtype=dtype_name(dtype))  # MLX's types cannot be pickled

    def of(self, kind: type) -> dict[str, Any]:
        """Return the options of one kind as keywords."""
        return {each.name: getattr(self, each.name) for each in fields(kind)}
