"""Training the shipped models further: on learners' errors, and on text with any character.

`python weights/training/train_correct.py learners` runs it. It starts from a converted folder, the
vocabulary of which gets bytes and common characters if it has none, and trains for a number of
minutes; a run that was stopped resumes. The rate is constant, then goes down to 0 in the last
quarter. The loss on held-out examples, of `corruption`'s kind, of learners' and of edited prose
where there is any, is printed at every checkpoint. With a teacher, a model learns the teacher's
distributions instead of the right tokens. With caution, it learns to leave what it is not sure of
as it is; a model with a teacher has that from the teacher, and caution then changes only the
outputs that it sees.

The result may keep a share of the weights that it started from: the mean of two models on one path
of training is often better than either (Wortsman et al. 2022, "Robust fine-tuning of zero-shot
models", arXiv:2109.01903).
"""

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speculative_t5 import load

import mlx.core as mx
import sentencepiece as spm
import torch
from byte_pieces import add_pieces
from caution import Caution
from corruption import Corruptor, read_sentences
from learner_errors import Learner, mixed_examples, read_german
from prose import Paragraphs, Prose
from torch.nn.functional import kl_div
from train_correct import Example, batches, load_tokenizer, save_checkpoint
from transformers import T5ForConditionalGeneration
from transformers.optimization import Adafactor

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

from programs.checkpoints import as_hugging_face

OWN = ("prefix", "draft", "min_probability", "corrects", "split_special_tokens")
SENTINELS = 100  # ids that T5's tokenizers keep after the pieces
WARM_UP = 100  # steps
HELD_OUT = 150  # examples of each kind


def train_further(
    data: Path,
    work: Path,
    start_from: Path,
    *,
    minutes: float,
    rate: float,
    every: float,
    tokens: int,
    autocast: bool,
    compiled: bool = False,
    teacher: Path | None = None,
    caution: float = 0.0,
    keep: float = 0.0,
    technical: Sequence[Path] = (),
    stories: Sequence[Path] = (),
) -> None:
    """Train a converted folder further; write a checkpoint for convert.py of its name to `work`.

    The options are those of `train_correct.py learners`. bfloat16 (`autocast`) is very slow on a
    CPU without instructions for it; to compile takes some minutes and a C++ compiler. The teacher,
    or without one `start_from`, is asked for the probabilities of corrections; errors whose
    correction has less than `caution` stay in the targets, too. Runs that resume read `start_from`
    again for this and for `keep`.
    """
    name = start_from.name
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "spiece.model").exists():
        (work / "spiece.model").write_bytes(with_bytes((start_from / "spiece.model").read_bytes()))
    checkpoint = work / f"{name}.pt"
    state = torch.load(checkpoint) if checkpoint.exists() else None
    tokenizer = load_tokenizer(work)
    model = start(start_from, tokenizer.get_piece_size())
    run = Run(model, rate=rate, minutes=minutes, autocast=autocast, compiled=compiled, state=state)
    if teacher is not None:
        run.teacher = T5ForConditionalGeneration.from_pretrained(teacher).eval()
    if caution:
        asked = run.teacher or start(start_from, tokenizer.get_piece_size())
        run.caution = Caution(asked, tokenizer, least=caution, autocast=autocast)
    sentences, unseen = read_sentences(data)
    german = read_german(data)
    learner, corruptor = Learner(sentences, german), Corruptor(sentences)
    held_out = random.Random(1)
    judged = {
        kind: [encode(tokenizer, damager.example(unseen, held_out)) for _ in range(HELD_OUT)]
        for kind, damager in (("old", corruptor), ("new", learner))
    }
    from_prose = None
    if technical or stories:
        seen, unseen_prose = Paragraphs.read(technical, stories)
        prose = Prose([*seen.technical, *seen.stories, *sentences], german)
        from_prose = partial(prose.example, seen)
        judged["prose"] = [
            encode(tokenizer, prose.example(unseen_prose, held_out)) for _ in range(HELD_OUT)
        ]

    def examples() -> Iterator[Example]:
        seed = run.step + 7
        for pair in mixed_examples(learner, corruptor, sentences, seed, prose=from_prose):
            yield encode(tokenizer, pair)

    run.train(examples, judged, checkpoint, every=every, batch=tokens)
    if keep:
        mix(model, start(start_from, tokenizer.get_piece_size()), keep)
        run.judge(judged, f"with {keep:g} of the weights before")
    model.generation_config.max_length = None
    model.save_pretrained(work / name)
    shutil.copy(work / "spiece.model", work / name / "spiece.model")
    keep_own(work / name / "config.json", start_from / "config.json")


def with_bytes(stored: bytes) -> bytes:
    """Extend a spiece.model by bytes, unless it has them."""
    has_bytes = spm.SentencePieceProcessor(model_proto=stored).piece_to_id("<0x00>") != 2
    return stored if has_bytes else add_pieces(stored)


def start(folder: Path, pieces: int) -> T5ForConditionalGeneration:
    """Load a converted folder into transformers, its vocabulary extended to this many pieces.

    New rows are random about the mean of the present ones.
    """
    converted, _ = load(folder, dtype=mx.float32)
    with tempfile.TemporaryDirectory() as checkpoint:
        as_hugging_face(converted, Path(checkpoint))
        # No dropout: no damaged sentence comes twice, and on a CPU it takes a third of a step.
        model = T5ForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32, dropout_rate=0.0, attn_implementation="eager"
        )
    size = -(-(pieces + SENTINELS) // 64) * 64
    old = model.get_input_embeddings().weight.detach().clone()
    own = load_tokenizer(folder).get_piece_size()
    if pieces > own:
        model.resize_token_embeddings(max(size, len(old)), mean_resizing=False)
        table, used = model.get_input_embeddings().weight.data, old[3:own]
        noise = torch.randn(len(table) - own, old.shape[1], generator=torch.manual_seed(0))
        table[own:] = used.mean(0) + 0.5 * used.std(0) * noise
    model.config.decoder_start_token_id = 0
    return model


def encode(tokenizer: spm.SentencePieceProcessor, pair: tuple[str, str]) -> Example:
    source, target = (tokenizer.encode(text, add_eos=True) for text in pair)
    return source, target


class Run:
    """A training run that ends by the clock, and can be stopped and resumed."""

    def __init__(
        self,
        model: T5ForConditionalGeneration,
        *,
        rate: float,
        minutes: float,
        autocast: bool,
        compiled: bool = False,
        state: dict[str, Any] | None,
    ) -> None:
        torch.manual_seed(0)
        self._model, self._rate, self._seconds = model.train(), rate, minutes * 60
        # Of any length: a step is a fifth faster on a CPU with AMX.
        self._trained_model = torch.compile(model, dynamic=True) if compiled else model
        self._autocast = autocast
        self._optimizer = Adafactor(
            model.parameters(),
            lr=rate,
            scale_parameter=True,
            relative_step=False,
            warmup_init=False,
        )
        self.step, self._trained = 0, 0.0
        self.teacher: T5ForConditionalGeneration | None = None
        self.caution: Caution | None = None
        if state:
            model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self._trained = state["step"], state["seconds"]

    def rate_at(self, seconds: float) -> float:
        """Return the rate: constant, then down to 0 over the last quarter of the time."""
        left = max(0.0, 1 - seconds / self._seconds)
        return self._rate * min(1.0, 4 * left, (self.step + 1) / WARM_UP)

    def train(
        self,
        examples: Callable[[], Iterator[Example]],
        judged: dict[str, list[Example]],
        checkpoint: Path,
        *,
        every: float,
        batch: int,
    ) -> None:
        """Train until the time is over, with a checkpoint and held-out losses now and then."""
        source = batches(examples(), self.step, tokens=batch)
        began = time.perf_counter() - self._trained
        saved, tokens, losses = self._trained, 0, []
        while (now := time.perf_counter() - began) < self._seconds:
            ids, mask, labels = next(source)
            if self.caution is not None:
                labels = self.caution(ids, mask, labels)
            for group in self._optimizer.param_groups:
                group["lr"] = self.rate_at(now)
            loss = self._loss(ids, mask, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self.step += 1
            tokens += ids.numel() + labels.numel()
            losses.append(loss.item())
            if self.step % 25 == 0:
                mean = sum(losses) / len(losses)
                speed = tokens / (time.perf_counter() - began - self._trained)
                print(
                    f"{now / 60:5.1f} min  step {self.step}  loss {mean:.4f}  {speed:.0f} tokens/s",
                    flush=True,
                )
                losses = []
            if now - saved > every * 60:
                saved = now
                self._save(checkpoint, now, judged)
        self._save(checkpoint, self._seconds, judged)

    def _save(self, path: Path, seconds: float, judged: dict[str, list[Example]]) -> None:
        save_checkpoint(path, self._model, self._optimizer, self.step, seconds=seconds)
        self.judge(judged, f"{seconds / 60:5.1f} min")

    def judge(self, judged: dict[str, list[Example]], when: str) -> None:
        """Print the loss on each kind of held-out examples."""
        found = [f"{kind} {self._held_out(examples):.4f}" for kind, examples in judged.items()]
        print(f"{when}  held-out loss: {', '.join(found)}", flush=True)

    @torch.no_grad()
    def _held_out(self, examples: list[Example]) -> float:
        """Return the loss a token, padding left out, over groups of similar length."""
        total = count = 0.0
        parts = batches(iter(examples), seed=0, forever=False)
        for ids, mask, labels in parts:
            kept = int((labels != -100).sum())
            total += self._loss(ids, mask, labels).item() * kept
            count += kept
        return total / count

    def _loss(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        model = self._trained_model if torch.is_grad_enabled() else self._model
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            output = model(input_ids=ids, attention_mask=mask, labels=labels)
            if self.teacher is None:
                return output.loss
            with torch.no_grad():
                logits = self.teacher(input_ids=ids, attention_mask=mask, labels=labels).logits
        kept = labels != -100
        learnt, taught = (x[kept].float().log_softmax(-1) for x in (output.logits, logits))
        return kl_div(learnt, taught, reduction="batchmean", log_target=True)


@torch.no_grad()
def mix(model: torch.nn.Module, other: torch.nn.Module, share: float) -> None:
    """Move all weights of a model by a share of the way to those of another."""
    for own, others in zip(model.parameters(), other.parameters(), strict=True):
        own.lerp_(others, share)


def keep_own(path: Path, source: Path) -> None:
    """Copy what a config.json has of ours, see `OWN`, to another."""
    config = json.loads(path.read_text(encoding="utf-8"))
    before = json.loads(source.read_text(encoding="utf-8"))
    config |= {name: before[name] for name in OWN if name in before}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
