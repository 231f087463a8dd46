"""Reward sources: how they are called, how they add up, and one line for each thing that can go wrong."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from rlhf import scoring
from rlhf.experience import response_mask_from
from rlhf.micro_batches import Cut
from rlhf.models import new_score_model, scores
from rlhf.rollout import Rollout
from rlhf.scoring import Answers, Scorer, function_source, http_source
from tests.rlhf.tiny_models import folder, tokenizer

ANSWERS = Answers(["P one", "P two"], ["a", "bbb"], [{"prompt": "P one", "key": 3}, {"prompt": "P two", "key": 5}])


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("""
import torch
def each(prompt, answer): return len(answer) + (prompt == "P two")
def with_row(prompt, answer, row): return row["key"]
def lists(prompts, answers): return torch.tensor([float(len(a)) for a in answers])
def lists_with_rows(prompts, answers, rows): return [row["key"] for row in rows]
def short(prompts, answers): return [1.0]
def one(prompts, answers): return 1.0
def nan(prompt, answer): return float("nan") if answer == "bbb" else 0
def text(prompt, answer): return "good"
def nothing(prompt, answer): pass
def fails(prompt, answer): raise KeyError("no such\\nkey")
def constant(prompt, answer): return 0.5
""")
    return lambda name, *flag: function_source(f"{path}:{name}", *flag)


@pytest.mark.parametrize(
    ("name", "expected"), [("each", [1, 4]), ("with_row", [3, 5]), ("lists", [1, 3]), ("lists_with_rows", [3, 5])]
)
def test_functions_are_called_for_one_answer_or_for_all(functions, name, expected):
    assert functions(name)(ANSWERS) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "returned 1 rewards for 2 answers"),
        ("one", "returned a float, not a list of 2 numbers"),
        ("nan", "gave nan for answer 2, 'bbb': a reward is a finite number"),
        ("text", "gave 'good' for answer 1, 'a'"),
        ("nothing", "gave None for answer 1"),
        ("fails", "failed: KeyError: "),
    ],
)
def test_what_is_wrong_with_a_function_is_one_line(functions, name, message):
    with pytest.raises(ValueError, match=message) as error:
        functions(name)(ANSWERS)
    assert f"rewards.py:{name}" in str(error.value) and "\n" not in str(error.value)


def test_a_function_of_another_flag_is_named_by_it(functions):
    with pytest.raises(ValueError, match="^--gold_fn .*:nothing gave None for answer 1"):
        functions("nothing", "--gold_fn")(ANSWERS)


@pytest.fixture
def serve(monkeypatch):
    """A server on this machine that gives the replies in turn: (status, text), or None to stay silent for a while."""
    monkeypatch.setattr(scoring, "WAIT_SECONDS", 0.0)
    servers = []

    def start(*replies):
        left, seen = list(replies), []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                reply = left.pop(0)
                if reply is None:
                    time.sleep(0.5)
                    return
                self.send_response(reply[0])
                self.end_headers()
                self.wfile.write(reply[1].encode())

            def log_message(self, *words):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/score", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_endpoint_gets_prompts_and_answers(serve):
    url, seen = serve((200, '{"rewards": [0.5, -1]}'), (200, "[2, 3]"))
    source = http_source(url, 5.0)
    assert source(ANSWERS) == [0.5, -1.0] and source(ANSWERS) == [2.0, 3.0]
    assert seen[0] == {"prompts": ["P one", "P two"], "answers": ["a", "bbb"]}


def test_an_endpoint_that_is_busy_is_asked_again(serve):
    url, seen = serve((503, "busy"), (500, "still"), (200, "[1, 2]"))
    assert http_source(url, 5.0)(ANSWERS) == [1.0, 2.0] and len(seen) == 3


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([(404, "")], r"answered with HTTP status 404 \(Not Found\)"),
        ([(500, "")] * 3, "answered with HTTP status 500"),
        ([(200, "<html>")], "is not JSON: '<html>'"),
        ([(200, '{"scores": [1, 2]}')], 'answered without "rewards": it has scores'),
        ([(200, "[1]")], "returned 1 rewards for 2 answers"),
        ([(200, "[1, NaN]")], "gave nan for answer 2"),
        ([None], "did not answer within 0.1 s: raise --reward_timeout"),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_one_line(serve, replies, message):
    url, _ = serve(*replies)
    with pytest.raises(ValueError, match=message) as error:
        http_source(url, 0.1 if None in replies else 5.0)(ANSWERS)
    assert str(error.value).startswith(f"--reward_url {url} ") and "\n" not in str(error.value)


def test_an_endpoint_that_is_not_there(monkeypatch):
    monkeypatch.setattr(scoring, "WAIT_SECONDS", 0.0)
    with pytest.raises(ValueError, match="127.0.0.1:9/ cannot be reached: .*refused"):
        http_source("http://127.0.0.1:9/", 5.0)(ANSWERS)


def test_sources_add_up_with_their_weights(functions):
    words = tokenizer()
    ids = torch.tensor([words("Say red.")["input_ids"][:3] + words("red")["input_ids"][:1] + [2]] * 2)
    length = 2
    mask = torch.ones_like(ids, dtype=torch.bool)
    rollout = Rollout(
        ids, mask, response_mask_from(torch.tensor([2, 2]), length), torch.zeros(2, 2), torch.tensor([2, 2]),
        torch.tensor([True, True]), [{"prompt": "P one"}, {"prompt": "P two"}],
    )  # fmt: skip
    model = new_score_model(folder(), tokenizer(), seed=0).eval()
    alone = Scorer(words, model)(rollout, Cut(1))
    torch.testing.assert_close(alone, scores(model, ids, mask).detach())
    sources = [(functions("constant"), 4.0), (functions("each"), -1.0)]
    texts = rollout.texts(words)
    expected = -0.5 * alone + 2.0 - torch.tensor([float(len(texts[0])), len(texts[1]) + 1.0])
    torch.testing.assert_close(Scorer(words, model, -0.5, None, sources)(rollout, Cut(2)), expected)
    torch.testing.assert_close(Scorer(words, sources=sources)(rollout, Cut(2)), expected + 0.5 * alone)
