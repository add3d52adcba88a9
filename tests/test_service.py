"""The service: what a call gets is what the decoder gives it alone, whatever else goes on."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import Batch, Stats
from speculative_t5.decoding.logits import NOTHING_LEFT
from speculative_t5.generation import Chunk, GenerationOptions, as_chunk
from speculative_t5.serve import service
from speculative_t5.serve.requests import Refused
from speculative_t5.serve.service import Call, Service

import pytest
from conftest import VARIED, tiny_pair
from messages import check_message
from test_decoder import make_decoder, prompts
from test_rows import WAYS
from test_stops import WORDS, Letters

pytestmark = pytest.mark.anyio  # each test has an event loop of its own
Outputs = list[tuple[list[int], str, str]]  # tokens, finish reason and text of each
FOREVER = GenerationOptions(max_tokens=200, min_tokens=200)  # many rounds
SHORT = GenerationOptions(max_tokens=9)


async def collect(call: Call) -> Outputs:
    """Return the outputs of a call, whose chunks come in order."""
    found: list[list[Chunk]] = [[] for _ in range(call.left)]
    async for added in call.chunks():
        assert added
        number, chunk = added
        assert not found[number] or found[number][-1].finish_reason is None
        found[number].append(chunk)
        assert chunk.stats.emitted >= sum(len(each.tokens) for each in found[number])
    return [
        (
            [token for chunk in chunks for token in chunk.tokens],
            chunks[-1].finish_reason or "",
            "".join(chunk.text for chunk in chunks),
        )
        for chunks in found
    ]


async def check_failure(call: Call, status: int, message: str) -> None:
    """Check that a call ends in an error."""
    with pytest.raises(Refused) as raised:
        await collect(call)
    assert (raised.value.status, str(raised.value)) == (status, message)
    assert call.cancelled


def check_unavailable(use: Callable[[], object], *, for_ever: bool = False) -> None:
    """Check that something cannot be had from a service, and whether to ask again."""
    with pytest.raises(Refused) as refused:
        use()
    check_message(str(refused.value))
    assert "'x'" not in str(refused.value) and refused.value.status == 503
    assert ("Retry-After" not in refused.value.response.headers) == for_ever


class Gate:
    """Holds rounds back while it is closed, and lets single ones pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Batch.round

        def round_(batch: Batch) -> Any:
            assert self._passes.acquire(timeout=60)
            return real(batch)

        monkeypatch.setattr(Batch, "round", round_)
        self.close()
        self.open()

    def close(self) -> None:
        self._passes = threading.Semaphore(0)

    def open(self, rounds: int = 10**6) -> None:
        self._passes.release(rounds)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@asynccontextmanager
async def serving(
    decoder: SpeculativeDecoder | None = None, gate: Gate | None = None, **options: Any
) -> AsyncIterator[Service]:
    """Run a service that is ready; a gate is closed then, and opened at the end."""
    served = Service(lambda: decoder or make_decoder("t5", "none"), **options)
    served.start()
    await until(lambda: served.state != "loading")
    if gate:
        gate.close()
    try:
        yield served
    finally:
        if gate:
            gate.open()
        await served.stop(0)
        await until(lambda: not served.is_running)
        assert is_now(served, queued=0, rows=0)


def is_now(served: Service, **expected: int) -> bool:
    """Whether these figures are those of the service."""
    return served.figures().items() >= expected.items()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def by_decoder(decoder: SpeculativeDecoder, given: list[Any], options: dict[str, Any]) -> Outputs:
    """Return what a call should get."""
    found = []
    for out in decoder.generate_batch(given, batch_size=1, **options):
        found += [(o.tokens, o.finish_reason, o.text) for o in (out, *out.alternatives)]
    return found


MORE_WORDS = [*WORDS, "ca", "d", "ad", "da", "dd"]


def varied_pair(kind: str = "t5") -> Any:
    return tiny_pair(kind, noise=0.2, vocab_size=20, layers=2, seed=VARIED[kind])


def make_lettered(kind: str) -> SpeculativeDecoder:
    """A decoder whose tokens are letters."""
    target, draft = varied_pair(kind)
    return SpeculativeDecoder(target, draft, Letters(MORE_WORDS), num_draft=4)


def random_call(rng: random.Random) -> tuple[list[Any], dict[str, Any]]:
    given = rng.choices(prompts(40), k=rng.choice([1, 1, 1, 2, 5]))
    options = {"max_tokens": rng.randint(1, 20)} | rng.choice(WAYS)
    if options.get("temperature"):
        options |= {"seed": rng.randint(0, 9), "num_return_sequences": rng.randint(1, 3)}
    return given, options


@pytest.mark.parametrize(("kind", "calls"), [("t5", 16), ("gpt2", 6), ("sharing", 6)])
async def test_calls_get_what_the_decoder_gives_them_alone(kind: str, calls: int) -> None:
    decoder = make_lettered(kind)
    rng = random.Random(1)
    wanted = [random_call(rng) for _ in range(calls)]
    for given, options in wanted[:6]:
        options["stop"] = rng.sample("abcdefghijklm", 2)
        given[:] = given[:2]
    expected = [by_decoder(decoder, given, options) for given, options in wanted]
    assert {reason for outputs in expected for _, reason, _ in outputs} == {"eos", "length", "stop"}

    async def calling(served: Service, place: int) -> Outputs:
        given, options = wanted[place]
        for _ in range(place % 7):  # some join while others are being decoded
            await asyncio.sleep(0.002)
        call = served.submit(given, GenerationOptions(**options))
        assert call.prompt_tokens == sum(map(len, given))
        return await collect(call)

    async with serving(decoder, batch_size=5) as served:
        found = await asyncio.gather(*(calling(served, i) for i in range(len(wanted))))
        assert found == expected
        figures = served.figures()
        assert figures["emitted"] >= sum(len(o) for each in expected for o, *_ in each)
        assert figures["drafted"] >= figures["accepted"] > 0 and figures["rounds"] > 1
        assert figures["prompt_tokens"] == sum(len(p) for given, _ in wanted for p in given)
        assert figures["failures"] == 0 and "seconds_since_round" in figures


async def test_a_cancelled_call_frees_its_rows_and_others_go_on(gate: Gate) -> None:
    decoder = make_decoder("t5", "none")
    async with serving(decoder, gate, batch_size=3) as served:
        leaving = served.submit([prompts()[0]] * 5, FOREVER)
        await until(lambda: is_now(served, rows=2))
        other = served.submit([prompts()[0]], FOREVER)
        gate.open(1)
        await until(lambda: is_now(served, rows=3))
        staying = served.submit([prompts()[1]], SHORT)
        assert is_now(served, queued=4)
        leaving.cancel()
        leaving.cancel()
        assert is_now(served, queued=1)
        gate.open(2)
        await until(lambda: is_now(served, rows=2, queued=0))
        gate.open()
        assert await collect(staying) == by_decoder(decoder, [prompts()[1]], {"max_tokens": 9})
        assert [added async for added in leaving.chunks()] == []
        assert is_now(served, failures=0)
        other.cancel()


async def test_the_queue_is_bounded_and_counted_before_work(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder("t5", "none")
    async with serving(decoder, gate, batch_size=2, max_queue=6) as served:
        first = [served.submit(prompts(1), SHORT) for _ in range(2)]
        gate.open(1)  # the first may have joined alone
        await until(lambda: is_now(served, rows=2))
        waiting = [served.submit(prompts(3), SHORT) for _ in range(2)]
        assert is_now(served, queued=6)
        tokenized: list[Any] = []
        monkeypatch.setattr(decoder, "fit", lambda *a: tokenized.append(a))
        for count in (1, 6):
            with pytest.raises(Refused) as busy:
                served.submit(prompts(count), SHORT)
            assert busy.value.status == 429
            assert int(busy.value.response.headers["Retry-After"]) >= 1
            check_message(str(busy.value), "6 outputs")
        assert not tokenized
        monkeypatch.undo()
        gate.open()
        for call in (*first, *waiting):
            await collect(call)
        expected = by_decoder(decoder, prompts(6), {"max_tokens": 9})
        assert await collect(served.submit(prompts(6), SHORT)) == expected


async def test_calls_take_turns(gate: Gate) -> None:
    """A call of many outputs does not hold up one that comes after it."""
    short = GenerationOptions(max_tokens=2, min_tokens=2)
    order: list[Call] = []  # of outputs that ended, when they are sent: they may be read later

    def sent(results: Any, send: Any) -> None:
        order.extend(output.call for output, chunk in results if chunk.finish_reason)
        send(results)

    async with serving(gate=gate, batch_size=1) as served:
        served._send = partial(sent, send=served._send)  # type: ignore[method-assign]
        many = served.submit(prompts(8), short)
        second, third = (served.submit(prompts(1), short) for _ in range(2))
        gate.open()
        await asyncio.gather(*map(collect, (many, second, third)))
        assert order[:4].count(many) <= 2 and len(order) == 10
        assert order.index(second) < order.index(third)


async def test_a_call_leaves_a_row_to_others(gate: Gate) -> None:
    async with serving(gate=gate, batch_size=3) as served:
        many = served.submit(prompts(8), FOREVER)
        await until(lambda: is_now(served, rows=2))
        other = served.submit(prompts(1), GenerationOptions(max_tokens=2))
        gate.open(4)
        await collect(other)
        assert is_now(served, rows=2, queued=6)
        many.cancel()


async def test_long_prompts_join_a_few_at_a_time(gate: Gate) -> None:
    async with serving(gate=gate, batch_size=8) as served:
        call = served.submit([[5] * 200] * 5, FOREVER)
        for rows in (2, 4, 5):
            await until(partial(is_now, served, rows=rows))
            gate.open(1)
        call.cancel()


async def test_what_a_server_does_not_do_is_refused() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "scores": {"scores": True},
        "num_beams": {"num_beams": 2},
        "the id 20": {"suppress_tokens": [20]},
        "9 outputs": {"num_return_sequences": 9, "temperature": 1.0},
        "bad_words has the text": {"bad_words": ["a"]},
    }
    given: list[Any] = ["text", ["text"], [[]], [[99, 1]], [[5, 1], []], [None]]
    cases = [("", each, {}) for each in given]
    cases += [(named, [[5, 1]], options) for named, options in wrong.items()]

    async with serving(max_queue=8) as served:
        for named, prompts, options in cases:
            with pytest.raises((ValueError, Refused)) as refused:
                served.submit(prompts, GenerationOptions(**options), "text")
            check_message(str(refused.value), named)
            if isinstance(refused.value, Refused):
                assert (refused.value.status, refused.value.body["error"]["param"]) == (400, "text")
            else:
                assert named or not isinstance(prompts, list)
        assert is_now(served, queued=0, prompt_tokens=0), "what is refused does not wait"


async def test_a_failure_ends_its_batch_and_the_service_goes_on(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = make_decoder("t5", "both")
    expected = by_decoder(decoder, prompts(4), {"max_tokens": 9})
    failures = [RuntimeError("device /dev/secret is lost\nand more")]

    def round_(batch: Batch, real: Any = Batch.round) -> Any:
        if failures:
            raise failures.pop()
        return real(batch)

    async with serving(decoder, gate, batch_size=1) as served:
        monkeypatch.setattr(Batch, "round", round_)
        call, waiting = (served.submit(prompts(count), SHORT) for count in (2, 4))
        gate.open()
        await check_failure(call, 500, service.DECODING_FAILED)
        assert await collect(waiting) == expected, "those that waited are decoded all the same"
        assert served.figures()["failures"] == 1 and served.state == "ready"
    check_message(service.DECODING_FAILED)
    assert "secret" in caplog.text


async def test_an_output_that_nothing_can_follow_ends_alone() -> None:
    decoder = make_decoder("t5", "model")
    async with serving(decoder) as served:
        others = served.submit(prompts(4), SHORT)
        hopeless = served.submit([[5, 1]], GenerationOptions(suppress_tokens=range(20)))
        await check_failure(hopeless, 400, NOTHING_LEFT)
        assert await collect(others) == by_decoder(decoder, prompts(4), {"max_tokens": 9})
        assert is_now(served, failures=0), "the request is wrong, and nothing has failed"


async def test_a_text_that_cannot_be_made_ends_its_output_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = make_lettered("t5")

    def fails_for_the_second(done: Any, detokenizer: Any) -> Any:
        if done.index == 1:
            raise RuntimeError("no text")
        return as_chunk(done, detokenizer)

    async with serving(decoder) as served:
        monkeypatch.setattr(service, "as_chunk", fails_for_the_second)
        calls = [served.submit([p], SHORT) for p in prompts(2)]
        assert await collect(calls[0]) == by_decoder(decoder, prompts(1), {"max_tokens": 9})
        await check_failure(calls[1], 500, service.DECODING_FAILED)


async def test_a_model_that_cannot_be_loaded_is_a_failure() -> None:
    def load() -> SpeculativeDecoder:
        raise ValueError("there is no model 'x': give another\nsecond line")

    served = Service(load)
    check_unavailable(lambda: served.submit([[5, 1]], FOREVER))
    assert "seconds_since_round" not in served.figures()
    served.start()
    await until(lambda: served.state == "failed")
    check_unavailable(lambda: served.submit([[5, 1]], FOREVER), for_ever=True)
    check_unavailable(lambda: served.decoder, for_ever=True)
    await served.stop(1)
    assert isinstance(served.failure, ValueError), "whoever started it may raise it"
    assert str(served.failure).startswith("there is no model 'x': give another")


async def test_outputs_that_run_when_time_is_over_are_told_so(gate: Gate) -> None:
    async with serving(gate=gate, batch_size=3) as served:
        calls = [served.submit(prompts(2), FOREVER) for _ in range(4)]  # the last has no row
        gate.open(1)  # the first may have joined alone
        await until(lambda: is_now(served, rows=3))
        stopping = asyncio.create_task(served.stop(0))
        await until(lambda: served.state != "ready")
        gate.open(1)
        await stopping
        for each in calls:
            await asyncio.wait_for(check_failure(each, 503, str(service.stopped())), 10)
        assert served.state == "stopped" and served.figures()["failures"] == 0
    check_message(str(service.stopped()))


async def test_a_thread_that_hangs_leaves_nobody_waiting(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "GRACE_SECONDS", 0.05)
    async with serving(gate=gate) as served:
        call = served.submit(prompts(1), FOREVER)
        await until(lambda: is_now(served, rows=1))
        await served.stop(0)
        await check_failure(call, 503, str(service.stopped()))
        assert served.state == "stopped" and served.is_running
    assert served.state == "stopped"


async def test_a_service_that_never_started_stops() -> None:
    served = Service(lambda: make_decoder("t5", "none"))
    await served.stop(0)
    assert served.state == "stopped"


async def test_a_steady_decoder_has_one_row_and_an_adaptive_one_gives_what_a_fixed_number_gives(
    gate: Gate,
) -> None:
    target, draft = varied_pair()
    steady = SpeculativeDecoder(target, draft, num_draft=3, steady=True)
    adaptive = SpeculativeDecoder(target, draft, num_draft="auto")
    fixed = SpeculativeDecoder(target, draft, num_draft=5)
    for decoder, like, rows in ((steady, steady, 1), (adaptive, fixed, 3)):
        options = {"max_tokens": 13, "temperature": 1.0 if decoder is adaptive else 0.0}
        async with serving(decoder, gate) as served:
            call = served.submit(prompts(3), GenerationOptions(**options))
            await until(partial(is_now, served, rows=rows))
            gate.open()
            assert await collect(call) == by_decoder(like, prompts(3), options)


async def test_only_a_call_that_waits_has_silences() -> None:
    """By a clock that stands still until it is moved."""

    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # type: ignore[method-assign]
    call = Call([1], 1, threading.Condition())
    chunk = Chunk("", [], 0, Stats())
    chunks = call.chunks(patience=10)
    for seconds, moves in ((9, True), (9, True), (11, False), (11, False), (9, True)):
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        now += seconds
        await asyncio.sleep(0)  # what is due now is run
        if moves:
            call.queue.put_nowait((0, chunk))
        assert await waiting == ((0, chunk) if moves else None)
    await chunks.aclose()
    assert call.cancelled


async def test_jobs_are_done_between_rounds() -> None:
    """What a job raises is its caller's; those that are left when the service ends are refused."""
    async with serving() as served:
        call = served.submit(prompts(2), FOREVER)
        found = served.compute(lambda decoder: decoder.log_probabilities([5, 1], [7, 8], 3))
        wrong = served.compute(lambda _: 1 // 0)
        wanted = make_decoder("t5", "none").log_probabilities([5, 1], [7, 8], 3)
        assert await asyncio.wrap_future(found) == wanted and len(wanted[1][1]) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.wrap_future(wrong), 30)
        assert served.state == "ready" and call.left == 2, "rounds go on"
        begun, stuck = threading.Event(), threading.Event()
        held = served.compute(lambda _: begun.set() or stuck.wait(60))
        await until(begun.is_set)
        left = served.compute(lambda _: None)
        stopping = asyncio.create_task(served.stop(0))
        await until(lambda: served.state != "ready")
        check_unavailable(lambda: served.compute(lambda _: None))
        stuck.set()
        await stopping
        assert await asyncio.wrap_future(held)
        with pytest.raises(Refused, match="stopped before"):
            await asyncio.wrap_future(left)


async def test_long_prompts_are_encoded_in_another_thread() -> None:
    """Nobody waits for them; what they get, and why they are refused, is as for others."""
    async with serving() as served:
        threads: list[int] = []
        reader = served.decoder.prompts
        fit = reader.fit

        def noted(prompt: Any) -> Any:
            threads.append(threading.get_ident())
            return fit(prompt)

        reader.fit = noted  # type: ignore[method-assign]
        try:
            given = prompts(3)
            found = await served.fitted(given)
            assert found == [fit(prompt).ids for prompt in given]
            assert len(threads) == 3 and threading.get_ident() not in threads
            with pytest.raises(Refused) as refused:
                await served.fitted([[10**6]], "messages")
            assert refused.value.body["error"]["param"] == "messages"
        finally:
            del reader.fit  # type: ignore[method-assign]


@pytest.mark.parametrize("reason", [service.IS_LOADING, service.IS_STOPPING])
def test_a_refusal_knows_its_reason_without_advice_in_another_process(reason: str) -> None:
    refused = Refused(503, f"{reason}: wait", reason=reason)
    assert Refused.again(refused.keywords).reason == reason
    assert Refused.again(Refused(400, "no: send it").keywords).reason == "no: send it"
