"""What the order of a stage's items hangs on: a position saved in one order means nothing in another.

An identity is JSON-ready: what all items share, and for each source what its own hang on.

    {"all": {"seed": 3, "max_tokens": 512, ...}, "sources": [{"source": "rows.jsonl", "limit": None, ...}]}

What makes batches of items may add an "order" of its own. A run writes its identity down beside its position
(`ItemSet.identity`, `ItemStream.identity`), and the run that goes on from there calls `refuse_other`. Names are those
of the flags and source options, so that a message says what to change.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from data.items import Rules
from data.sources import Source
from data.splits import Ratios, parse_ratios

CONTENT, TOKENIZER = "content", "tokenizer"
_FIX = {
    CONTENT: "put its files back as they were, or begin anew in another --output_dir",
    TOKENIZER: "resume with the tokenizer and chat template of the run that saved it",
}
_FIX_FLAGS = "resume with the data flags of the run that saved it"

Identity = dict[str, Any]


def identity_of(shared: dict[str, Any], rules: Rules, tokenizer: str, sources: list[dict[str, Any]]) -> Identity:
    """Of a whole stage. `shared`: what else all items hang on; `tokenizer`: its hash; `sources`: `source_identity`."""
    rule_names = {"limit": "max_tokens"}
    wanted = {rule_names.get(name, name): value for name, value in asdict(rules).items()}
    return {"all": {TOKENIZER: tokenizer, **wanted, **shared}, "sources": sources}


def source_identity(source: Source, content: str, ratios: Ratios | None = None) -> dict[str, Any]:
    """Of one source. `content`: a hash of what is in it; `ratios`: of its deal to the stages, if it is dealt."""
    asked = asdict(source)
    deal = {} if ratios is None else {"data_split": ",".join(map(str, parse_ratios(ratios)))}
    return {"source": asked.pop("name"), CONTENT: content, **asked, **deal}


def refuse_other(saved: Identity | None, now: Identity) -> None:
    """Raises ValueError, in one line, when a position was saved under another identity than `now`.

    None, of a position saved by a version that wrote down no identity, is taken as it is.
    """
    if saved is None:
        return
    if len(saved["sources"]) != len(now["sources"]):
        raise ValueError(
            f"the saved position is of {len(saved['sources'])} sources, this run has {len(now['sources'])}: "
            f"{_FIX_FLAGS}"
        )
    for before, after in zip(saved["sources"], now["sources"], strict=True):
        _compare(before, after, f"of {after['source']}")
    for part in ("all", "order"):
        _compare(saved.get(part, {}), now.get(part, {}), "of data")


def _compare(before: dict[str, Any], after: dict[str, Any], whose: str) -> None:
    # the flags first: other rows of a source would show as other content too
    for name in sorted({**before, **after}, key=lambda name: name in (CONTENT, TOKENIZER)):
        if name == "source" and before[CONTENT] == after[CONTENT]:
            continue  # the same data, moved
        if before.get(name) == after.get(name):
            continue
        if name in (CONTENT, TOKENIZER):
            raise ValueError(f"the saved position is {whose} with another {name} than this run's: {_FIX[name]}")
        raise ValueError(
            f"the saved position is {whose} with {name} {before.get(name)}, this run has {after.get(name)}: "
            f"{_FIX_FLAGS}"
        )
