"""Models and decoders shared by threads, copied, or used in forked processes."""

import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from typing import Any

from speculative_t5 import SpeculativeDecoder, decoding, device
from speculative_t5.causal import DecoderOnlyModel
from speculative_t5.decoding.outcomes import RunRates
from speculative_t5.generation import schedule_store
from speculative_t5.models import T5, SharingDraft, encoder_decoder

import mlx.core as mx
import numpy as np
import pytest
from conftest import PAIRS, REPOSITORY, VARIED, tiny_draft, tiny_model, tiny_pair

NUM_THREADS = 8
PROMPTS = [[*range(3 + i, 8 + i), 1] for i in range(NUM_THREADS)]


@pytest.fixture
def restless() -> Iterator[None]:
    """Let threads switch far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any], count: int = NUM_THREADS) -> list[Any]:
    """Return `work`'s results for 0 to count - 1, from threads that start together."""
    barrier = threading.Barrier(count)

    def begin(i: int) -> Any:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the shipped models; one that hangs is an error."""
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("kind", "num_draft"), [("t5", 3), ("t5", "auto"), ("qwen3", 3), ("sharing", 3)]
)
def test_threads_that_share_a_decoder_give_the_same_outputs(
    kind: str, num_draft: Any, monkeypatch: pytest.MonkeyPatch, restless: None
) -> None:
    begun: list[int] = []
    learning, add, stored = threading.Lock(), RunRates.add, schedule_store.stored

    def slowly_stored(*settings: object, **options: Any) -> decoding.AdaptiveSchedule:
        begun.append(1)
        time.sleep(0.2)  # all others have begun by then
        return stored(*settings, **options)

    def add_alone(rates: RunRates, outcomes: list[decoding.Outcome], num_rounds: int) -> None:
        assert learning.acquire(blocking=False)
        time.sleep(0.001)
        add(rates, outcomes, num_rounds)
        learning.release()

    monkeypatch.setattr(schedule_store, "stored", slowly_stored)
    monkeypatch.setattr(RunRates, "add", add_alone)
    model, draft = tiny_pair(kind, vocab_size=20, layers=2, seed=VARIED[kind])
    alone = SpeculativeDecoder(model, draft, num_draft=num_draft)
    expected = [alone.generate(prompt, max_tokens=20).tokens for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) > 2  # outputs that could be taken for each other's
    monkeypatch.setattr(encoder_decoder, "MAX_SHAPES", 2)
    if isinstance(model, T5):
        model.recompile()
        draft.recompile()
    shared = SpeculativeDecoder(model, draft, num_draft=num_draft)

    def work(first: int) -> list[list[int]]:
        order = first, (first + 1) % NUM_THREADS
        return [shared.generate(PROMPTS[i], max_tokens=20).tokens for i in order]

    both = zip(expected, [*expected[1:], expected[0]], strict=True)
    assert at_once(work) == [[*each] for each in both]
    assert len(begun) == (2 if num_draft == "auto" else 0), "one for each decoder"


@pytest.mark.parametrize("kind", PAIRS)
def test_one_thread_at_a_time_uses_a_gpu(
    kind: str, monkeypatch: pytest.MonkeyPatch, restless: None
) -> None:
    model, draft = tiny_pair(kind, vocab_size=20, layers=2, seed=VARIED[kind])
    session = type(model.start([PROMPTS[0]])[0])
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    inside: set[int] = set()
    together = []

    def watch(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        inside.add(threading.get_ident())
        together.append(len(inside))
        time.sleep(0)  # lets others run
        found = call(*args, **options)
        inside.discard(threading.get_ident())
        return found

    for name in ("step", "step_argmax", "encode", "replace", "select"):
        watched = partialmethod(partial(watch, getattr(session, name)))
        monkeypatch.setattr(session, name, watched)
    shared = SpeculativeDecoder(model, draft, num_draft=3)
    expected = shared.generate_batch(PROMPTS[:3], batch_size=2, max_tokens=9)

    def work(_: int) -> Any:
        shared.generate(PROMPTS[0], max_tokens=9, probabilities=True)
        return shared.generate_batch(PROMPTS[:3], batch_size=2, max_tokens=9)

    for found in at_once(work):
        assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert len(together) > 100 and max(together) == 1


@pytest.mark.parametrize("accelerated", [True, False])
def test_a_models_first_use_may_be_in_several_threads(accelerated: bool, restless: None) -> None:
    model, tokens = tiny_model(vocab_size=20), mx.array([[3, 4, 1]])
    if not accelerated:
        parameters, model = model.parameters(), T5(model.config)
        model.update(parameters)
    expected = model(tokens, tokens).tolist()

    def work(i: int) -> Any:
        # Arrays that another thread has made and not evaluated could not be evaluated in this one.
        if i % 2:
            return model(tokens, tokens).tolist()
        if i == 4:
            model.recompile()
        return model.start([[3, 4, 1]])[0].step(tokens).tolist()

    for _ in range(3):
        model.recompile()
        assert np.allclose(at_once(work), expected, atol=1e-4)


def test_a_model_works_in_another_thread_than_its_makers() -> None:
    llama = pytest.importorskip("mlx_lm.models.llama")

    # Llama 3 has an array that is no parameter.
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    module = llama.Model(llama.ModelArgs("llama", 16, 1, 16, 2, 1e-6, 20, rope_scaling=rope))
    assert "_freqs" in module.layers[0].self_attn.rope
    made = SpeculativeDecoder(DecoderOnlyModel(module, eos_token_id=1, max_context=64))
    (found,) = at_once(lambda _: made.generate(PROMPTS[0], max_tokens=5).tokens, 1)
    assert found == made.generate(PROMPTS[0], max_tokens=5).tokens


def test_each_thread_compiles_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX would leave the trace of a function that threads share in all of them but one."""
    monkeypatch.setattr(encoder_decoder, "MAX_SHAPES", 2)
    model = tiny_model(vocab_size=20)

    def step(width: int) -> list[Any]:
        mx.eval(model.start(PROMPTS[:1])[0].step(mx.zeros((1, width), mx.int32)))
        return list(model.compiled._functions.by_shape.values())

    (own,) = step(1)
    for width in range(1, 6):
        (others,) = at_once(lambda _, width=width: step(width), 1)  # type: ignore[misc]
        assert len(others) == 1 and others[0] is not own
    assert step(1) == [own]


def test_compiled_functions_are_released_with_their_model() -> None:
    """MLX keeps them for each thread, and would run one for a later model at its address."""
    pool = [ThreadPoolExecutor(1) for _ in range(2)]
    used: list[int] = []

    def step(model: T5) -> Any:
        return model.start([[5, 6, 7, 1]])[0].step(mx.array([[0]])).tolist()

    for seed in range(4):
        model = tiny_model(vocab_size=5000, seed=seed)
        size = model.shared.weight.nbytes + model.lm_head.weight.nbytes
        expected = step(model)
        assert all(thread.submit(step, model).result() == expected for thread in pool)
        if seed % 2:  # the functions go without the model, in this thread alone
            model.recompile()
            assert all(thread.submit(step, model).result() == expected for thread in pool)
        del model
        gc.collect()
        used.append(mx.get_active_memory())
    assert used[-1] - used[0] < size
    for thread in pool:
        thread.shutdown()


def test_a_stream_may_move_between_threads() -> None:
    """Web servers take each chunk in any thread of a pool."""
    model = tiny_model(vocab_size=20, layers=2, seed=VARIED["t5"])
    shared = SpeculativeDecoder(model, tiny_draft(model), num_draft=3)
    expected = [chunk.tokens for chunk in shared.stream(PROMPTS[0], max_tokens=24)]
    chunks, found = shared.stream(PROMPTS[0], max_tokens=24), []
    while chunk := at_once(lambda _: next(chunks, None), 1)[0]:
        found.append(chunk.tokens)
    assert found == expected and len(found) > 2


EXIT = """
from threading import Thread
from speculative_t5 import SpeculativeDecoder
import mlx.core as mx

decoder = SpeculativeDecoder.from_pretrained("correct-base", "correct-small")
# Many functions to release, so that waiting for the interpreter to do it takes longer.
more = mx.compile(lambda x: x + 1)

def work():
    for n in range(3):
        decoder.generate("correct: He dont know were his keys are.", max_tokens=2 + n)
    for n in range(300):
        more(mx.zeros(n + 1))

threads = [Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("end")
"""


def test_a_program_exits_cleanly_after_its_threads() -> None:
    """MLX releases a thread's compiled functions late, and aborts the program if it ends then."""
    done = run_script(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


FORK = """
import os, signal, sys, warnings
import speculative_t5
from speculative_t5 import SpeculativeDecoder

warnings.simplefilter("ignore")  # Python's own, about threads and forks
PROMPT = "correct: He dont know were his keys are."

def load(**options):
    return SpeculativeDecoder.from_pretrained("correct-small", **options)

def generate(decoder):
    return decoder.generate(PROMPT, max_tokens=8).text

def in_child(work):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(30)  # ends one that hangs
    try:
        print(work())
    except RuntimeError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)

assert in_child(lambda: generate(load())) == 0  # before the parent's first use
import mlx.core as mx
decoder, adaptive = load(), load(draft="lookup", num_draft="auto")
begun = decoder.stream(PROMPT)
next(begun)
in_child(lambda: generate(decoder))
in_child(lambda: decoder.generate_batch([PROMPT] * 2))
in_child(lambda: list(decoder.stream(PROMPT)))
in_child(lambda: decoder.model(mx.array([[3, 1]]), mx.array([[0]])))
in_child(lambda: generate(adaptive))
in_child(lambda: next(begun))
in_child(lambda: decoder.model.fingerprint)
in_child(load)
generate(decoder)
in_child(lambda: generate(decoder))
"""
ADVICE = (
    "this process was forked from one that had used MLX, and has none of its threads: "
    "use multiprocessing's spawn start method\n"
)


@pytest.mark.forks
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's libraries forbid such forks")
def test_forked_processes_work_or_say_what_to_do() -> None:
    done = run_script(FORK)
    assert done.stdout == "He doesn't know where his keys\n" + 9 * ADVICE, done.stderr


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kind", ["t5", "sharing"])
def test_copies_share_no_state(kind: str, copied: Callable[[Any], Any]) -> None:
    decoder = SpeculativeDecoder(*tiny_pair(kind), num_draft=3)
    unused = copied(decoder)
    expected = decoder.generate([3, 4, 1], max_tokens=12).tokens
    used, model = copied(decoder), copied(decoder.model)
    for one in (unused, used, SpeculativeDecoder(model)):
        assert one.generate([3, 4, 1], max_tokens=12).tokens == expected
    assert used.engine._schedules is not decoder.engine._schedules
    assert used.model is not decoder.model
    if isinstance(used.draft, SharingDraft):
        assert used.draft.target is used.model, "the copy's draft shares the copy's target"
