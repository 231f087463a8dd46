"""Where an answer's score comes from: a reward model, a Python function, an HTTP endpoint, or several, weighed and
summed.

A function is called as `function(prompt, answer)` and returns a number; one whose first parameter is called
`prompts` is called once with lists, `function(prompts, answers)`, and returns a list. Either may take the data row
besides, as a parameter called `row` (`rows`). Prompts are in marker form, answers are text without end token.

An endpoint gets `{"prompts": [...], "answers": [...]}` as JSON by POST and returns `{"rewards": [...]}` or the list.

A model whose tokenizer is not the actor's gets the dialogue re-tokenized, see `rlhf.retokenize`.
"""

from __future__ import annotations

import http.client
import inspect
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf.experience import Experience
from rlhf.gold import load_gold
from rlhf.micro_batches import Cut
from rlhf.model_files import one_line
from rlhf.models import end_scores, values
from rlhf.retokenize import Retokenizer
from rlhf.rollout import Rollout

ATTEMPTS = 3  # an endpoint that is starting, or busy for a moment, should not end a run of hours
WAIT_SECONDS = 1.0  # before the second attempt; twice as long before each further one


@dataclass
class Answers:
    """Prompts in marker form, answers as text, and the data rows they belong to, `B` each."""

    prompts: list[str]
    texts: list[str]
    rows: list[dict]


Source = Callable[[Answers], list[float]]


@dataclass
class Scorer:
    """A run's reward sources: a model (an engine around a score model), functions and endpoints, with their weights.

    tokenizer: the actor's. words: to the model's tokens, where they are others.
    """

    tokenizer: Any
    model: Any = None
    model_weight: float = 1.0
    words: Retokenizer | None = None
    sources: Sequence[tuple[Source, float]] = ()

    @torch.no_grad()
    def __call__(self, rollout: Rollout, cut: Cut) -> torch.Tensor:
        """The weighted sum for each answer, `[B]` fp32. Collective."""
        total = torch.zeros(len(rollout), device=rollout.input_ids.device)
        if self.model is not None:
            total += self.model_weight * self._model_scores(rollout, cut)
        if self.sources:
            answers = Answers([row["prompt"] for row in rollout.rows], rollout.texts(self.tokenizer), rollout.rows)
            for source, weight in self.sources:
                total += weight * total.new_tensor(source(answers))
        return total

    def _model_scores(self, rollout: Rollout, cut: Cut) -> torch.Tensor:
        self.model.eval()
        batch = rollout.experience()
        if self.words is not None:
            finished = rollout.finished.tolist()
            whole = self.words.whole(rollout.rows, rollout.texts(self.tokenizer), finished)
            ids, mask = (tensor.to(batch.input_ids.device) for tensor in self.words.padded(whole))
            batch = Experience(ids, mask, mask[:, -1:])  # only its lengths are asked for
            cut = Cut(cut.size)  # the budget counts the actor's tokens
        scores = torch.zeros(len(rollout), device=rollout.input_ids.device)
        for rows in cut.sorted_parts(batch):
            rows = rows.to(scores.device)
            ids, mask = batch.input_ids[rows], batch.attention_mask[rows]
            real = mask.any(0).nonzero().squeeze(1)
            ids, mask = ids[:, real[0] : real[-1] + 1], mask[:, real[0] : real[-1] + 1]
            scores[rows] = end_scores(values(self.model, ids, mask), mask)
        return scores


def function_source(spec: str, flag: str = "--reward_fn") -> Source:
    """Scores by the Python function that `spec`, the value of `flag`, names: `package.module:function` or
    `file.py:function`.

    Raises:
        ValueError, FileNotFoundError: there is no such function. When called, ValueError: the function fails, or
            returns something else than one finite number for each answer. One line each.
    """
    function = load_gold(spec)
    parameters = list(inspect.signature(function).parameters)
    at_once = bool(parameters) and parameters[0] == "prompts"
    wants_row = ("rows" if at_once else "row") in parameters
    name = f"{flag} {spec}"

    def score(answers: Answers) -> list[float]:
        try:
            if at_once:
                extra = {"rows": answers.rows} if wants_row else {}
                results = function(answers.prompts, answers.texts, **extra)
            else:
                triples = zip(answers.prompts, answers.texts, answers.rows, strict=True)
                results = [function(p, a, **({"row": row} if wants_row else {})) for p, a, row in triples]
        except Exception as error:  # whatever the user's function raises is the cause to show
            raise ValueError(f"{name} failed: {type(error).__name__}: {one_line(error)}") from error
        return checked(results, answers.texts, name)

    return score


def http_source(url: str, timeout_seconds: float) -> Source:
    """Scores from an HTTP endpoint; connection failures and answers of status 5xx are tried again twice.

    Raises, when called:
        ValueError: no answer in time, an HTTP error, or an answer that is not one finite number for each text.
    """
    name = f"--reward_url {url}"

    def score(answers: Answers) -> list[float]:
        body = json.dumps({"prompts": answers.prompts, "answers": answers.texts}).encode()
        headers = {"Content-Type": "application/json"}
        reply = _post(urllib.request.Request(url, body, headers), timeout_seconds, name)
        try:
            results = json.loads(reply)
        except ValueError:
            raise ValueError(f"{name} answered with something that is not JSON: {one_line(reply[:80])!r}") from None
        if isinstance(results, dict):
            if "rewards" not in results:
                known = ", ".join(map(str, results)) or "nothing"
                raise ValueError(f'{name} answered without "rewards": it has {known}')
            results = results["rewards"]
        return checked(results, answers.texts, name)

    return score


def _post(request: urllib.request.Request, timeout_seconds: float, name: str) -> str:
    for attempt in range(1, ATTEMPTS + 1):
        is_last = attempt == ATTEMPTS
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
                return response.read().decode("utf-8", errors="replace")
        except urllib.error.HTTPError as error:
            if error.code < 500 or is_last:
                raise ValueError(f"{name} answered with HTTP status {error.code} ({error.reason})") from None
        except TimeoutError:
            raise ValueError(
                f"{name} did not answer within {timeout_seconds:g} s: raise --reward_timeout or make it faster"
            ) from None
        # URLError among the first, a time-out while connecting as its reason; the second is a reply that breaks off
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError) or is_last:
                raise ValueError(f"{name} cannot be reached: {one_line(getattr(error, 'reason', error))}") from None
        time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def checked(results: Any, texts: Sequence[str], name: str) -> list[float]:
    """`results` as one finite float for each of `texts`.

    Raises:
        ValueError: another number of them, or one that is no finite number; names the first.
    """
    if hasattr(results, "tolist"):  # tensors and arrays
        results = results.tolist()
    if not isinstance(results, list | tuple):
        raise ValueError(f"{name} returned a {type(results).__name__}, not a list of {len(texts)} numbers")
    if len(results) != len(texts):
        raise ValueError(f"{name} returned {len(results)} rewards for {len(texts)} answers")
    numbers = []
    for number, (value, text) in enumerate(zip(results, texts, strict=True), start=1):
        try:
            as_float = float(value)
        except (TypeError, ValueError):
            as_float = math.nan
        if not math.isfinite(as_float):
            raise ValueError(f"{name} gave {value!r} for answer {number}, {text[:40]!r}: a reward is a finite number")
        numbers.append(as_float)
    return numbers
