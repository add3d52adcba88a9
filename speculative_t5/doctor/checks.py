"""What checks are: a function from a `Subject` to a `Finding`, run in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .. import device
from ..checkpoints import ModelFolder, default_type_of, open_checkpoint
from ..decoding import LanguageModel
from ..generation import SpeculativeDecoder
from ..kernels import native_parts, takes_quantized
from ..models import T5

Status = Literal["ok", "failed", "skipped"]
DRAFTED_TOKENS = 5  # tokens to draft, unless a check tries several numbers
CHECK_COMMAND = (sys.executable, "-m", "speculative_t5.doctor")
LAST_LINES = 20  # of standard error, kept with a failure


@dataclass(frozen=True)
class Subject:
    """The models that the checks are about; a check loads them if it needs them."""

    model: str  # the target's folder
    draft: str | None = None  # the draft's; None for prompt lookup, which needs no model
    dtype: str | None = None  # the name of the type to compute in; None for what `load` chooses

    @property
    def default_type(self) -> device.DefaultType:
        """The type that the target computes in by default; where it cannot be read, any model."""
        try:
            return default_type_of(ModelFolder(Path(self.model)))
        except (OSError, ValueError):
            return device.default_type()

    def check(self) -> None:
        """Refuse folders without a model, and a draft that does not fit.

        Weights are read only where a draft shares its target's encoder: they tell its target.
        """
        target = _described(self.model)
        if self.draft is None:
            return
        if ModelFolder(Path(self.draft)).kind == "t5-draft":
            self.decoder()
        elif target != (draft := _described(self.draft)):
            raise ValueError(
                f"the draft {self.draft} does not fit the target {self.model}: the target's "
                f"tokenizer has {target}, the draft's {draft}; choose another draft, or 'lookup'"
            )

    def decoder(self) -> SpeculativeDecoder:
        """Load the models, in the type of this subject, or else as `load` chooses."""
        return SpeculativeDecoder.from_pretrained(
            self.model, self.draft or "lookup", dtype=self.dtype, num_draft=DRAFTED_TOKENS
        )


def _described(path: str) -> str:
    """Describe a model by what a draft must have, too: its tokenizer's vocabulary."""
    folder = ModelFolder(Path(path))
    open_checkpoint(folder)  # refused here, if it is
    return f"{folder.tokenizer().vocabulary}"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str  # the check's
    status: Status
    reason: str  # one line that says what was found
    notes: Sequence[str] = ()  # further lines, for tables
    details: Mapping[str, Any] = field(default_factory=dict)  # as JSON can hold them
    seconds: float = 0.0  # that it took

    @classmethod
    def of(
        cls,
        name: str,
        fault: str | None,
        reason: str,
        details: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> Finding:
        """Return a failure that a fault is the reason for, or a success if there is none."""
        return cls(name, "failed" if fault else "ok", fault or reason, notes, details)


@dataclass(frozen=True)
class Check:
    """A check: a function from the subject to a finding."""

    find: Callable[[Subject], Finding]
    proves: str  # in a line
    loads: bool = False  # whether it loads the subject's models
    deadline: float = 300.0  # seconds after which its process is ended

    @property
    def name(self) -> str:
        return self.find.__name__


def run_check(check: Check, subject: Subject) -> Finding:
    """Run a check in a process (`__main__`); return its finding, or that of how it ended."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*CHECK_COMMAND, check.name],
            input=json.dumps(asdict(subject)),
            timeout=check.deadline,
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        stderr = (error.stderr or b"").decode("utf-8", "replace")
        ending = f"it did not end within {check.deadline:g} s"
    else:
        code, stderr, ending = done.returncode, done.stderr, ""
        if code < 0:
            ending = f"the process ended with signal {-code}, {signal.Signals(-code).name}"
        elif code or not done.stdout:
            ending = f"the process ended with exit code {code}"
    if ending:
        lines = [line for line in stderr.splitlines() if line.strip()][-LAST_LINES:]
        reason = f"{ending}: {' '.join(lines[-1].split())}" if lines else ending
        finding = Finding(check.name, "failed", reason, details={"stderr": lines})
    else:
        finding = Finding(**json.loads(done.stdout))
    return replace(finding, seconds=round(time.perf_counter() - began, 1))


def promises_equal_rows(model: LanguageModel) -> bool:
    """Whether a pass over several tokens gives the bits of passes over one (docs/exactness.md)."""
    if not isinstance(model, T5) or not device.on_cpu():
        return False
    how = model.config.quantization
    return (
        native_parts().get("layers") == "loaded"
        and model.dtype == mx.float32
        and (how is None or all(takes_quantized(*packing) for packing in how.packings))
    )


def dtype_of(model: LanguageModel) -> mx.Dtype:
    """Return the type that a model computes in, which is that of its logits."""
    session, (context,) = model.start([[model.info.eos_token_id]])
    return session.step(mx.array([context[-1:]], dtype=mx.int32)).dtype
