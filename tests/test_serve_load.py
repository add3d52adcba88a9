"""The load test of servers: what it measures and notices."""

import json
from collections.abc import Iterator
from pathlib import Path

from speculative_t5.serve import app
from speculative_t5.serve.requests import Refused

import pytest
import serve_load
from serving import FAIL, FakeService, Served, serving
from starlette.responses import JSONResponse, Response

PROMPTS = [f"Sentence number {i}." for i in range(40)]
IDLE = {"queued": 0.0, "rows": 0.0}


@pytest.fixture
def served() -> Iterator[Served]:
    """A server whose outputs are the prompts in capitals."""
    with serving(FakeService(pause=0.005, now=IDLE)) as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of prompts, whose outputs by `batch` are capitals."""

    def run(offline: serve_load.Offline) -> tuple[float, float]:
        texts = [prompt.upper() for prompt in offline.prompts]
        offline.texts = ["something else" if "AGAIN" in text else text for text in texts]
        return 1000.0, 50.0

    monkeypatch.setattr(serve_load.Offline, "run", run)
    path = tmp_path / "prompts.tsv"
    path.write_text("".join(f"{prompt}\tA correction.\n" for prompt in PROMPTS))
    return path


def test_every_output_is_checked_and_timed(
    served: Served, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.service.busy = 1  # times that the queue is full
    serve_load.main(
        [served.url], clients="1,8", requests=20, turns=2, prompts=prompts, as_json=True
    )
    found = json.loads(capsys.readouterr().out)
    batch, one, many = found["variants"]
    assert (batch["name"], batch["tokens_per_second"]) == ("batch", [1000.0, 1000.0])
    assert [one["clients"], many["clients"]] == [1, 8]
    for variant in (one, many):
        assert variant["name"].startswith("tiny at ")
        assert (variant["answers"], variant["differ"]) == (40, 0)
        assert len(variant["tokens_per_second"]) == 2 and min(variant["memory"]) > 10**7
        for half, most in (variant["first"], variant["whole"]):
            assert 0 < half <= most < 60
        assert variant["first"][0] < variant["whole"][0]
        assert min(variant["requests_per_second"]) > 0
    # Two turns of each variant, and a first one of 2 prompts by 1 client and 16 by 8.
    assert len(served.service.calls) == 4 * 20 + 2 + 16


def test_another_output_is_noticed(
    served: Served, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text(prompts.read_text().replace("number 7.", "number again 7."))
    with pytest.raises(SystemExit, match="outputs differ"):
        serve_load.main([served.url], clients="2", requests=40, turns=1, prompts=prompts)
    out, err = capsys.readouterr()
    table = out.splitlines()
    assert "39/40" in table[-1] and table[-1].split()[3] == "2"
    assert "instead of 'something else'" in err


async def lenient(*_: object) -> Response:
    return JSONResponse({})


async def traceback(*_: object) -> Response:
    return Refused(400, "Traceback (most recent call last):\n  oh").response


def test_what_a_server_must_not_do_ends_the_test(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fault, message in (
        ("answer_error", lenient, "was answered with status 200"),
        ("answer_error", traceback, "another message than one line"),
        ("DONE_EVENT", "", "has no end, no finish_reason or no usage"),
        ("PING_EVENT", "", "a stream ended by an error: decoding has failed"),
    ):
        if name == "PING_EVENT":
            prompts.write_text(f"a b {FAIL}\n")
        with monkeypatch.context() as patch:
            patch.setattr(app, name, fault)
            with serving(FakeService(now=IDLE)) as served, pytest.raises(SystemExit, match=message):
                serve_load.main(
                    [served.url], clients="4", requests=200, turns=1, prompts=prompts, disturb=True
                )
