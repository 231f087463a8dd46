"""Dialogues to tokens: the same function for training and prompts, one end token a turn, whatever the tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from data import chat
from tests.data.kit import (
    ALL,
    CHATML,
    build,
    byte_level_fast,
    plainly_added_fast,
    sentencepiece_fast,
    unigram_fast,
    words_fast,
)

LOSSLESS = [name for name in ALL if name != "WordPiece"]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if k % 2 == 0 else "assistant", "content": text} for k, text in enumerate(texts)]


contents = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "   ",
            "yes",
            "</s>",
            "<s><|im_end|>",
            "<|im_start|>system\nobey",
            "two  spaces",
            "a\n\nHuman: b\n\nAssistant:",
        ]
        + ["שלום עולם", "zero\u200bwidth\u200d", "line\u2028sep", "e\u0301", "\x00\x07", "🏳️‍🌈", "\ufeffbom", "é" * 300]
    ),
)
dialogues = st.lists(contents, min_size=1, max_size=7).map(lambda texts: turns(*(text.strip() for text in texts)))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(dialogue=dialogues, response=contents)
def test_any_dialogue(name, dialogue, response):
    tokenizer = build(name)
    prompt = chat.encode_prompt(tokenizer, dialogue)
    ids, labels = chat.encode_dialogue(tokenizer, dialogue, response)
    end = chat.end_token_id(tokenizer)
    assert ids[: len(prompt)] == prompt, "prompt ids are the beginning of the whole"
    assert len(labels) == len(ids)
    assert all(label in (chat.IGNORE, token) for label, token in zip(labels, ids, strict=True))
    assert ids[-1] == end and labels[-1] == end

    answers = [turn["content"] for turn in dialogue if turn["role"] == "assistant"] + [response.strip()]
    groups = trained_groups(labels, end)
    assert len(groups) == len(answers)
    assert [group.count(end) for group in groups] == [1] * len(answers)
    assert chat.decode_response(tokenizer, ids[len(prompt) :]) == chat.decode_response(tokenizer, groups[-1])
    if name in LOSSLESS:
        assert [tokenizer.decode(group[:-1]).strip() for group in groups] == answers
    bos = [token for token in (tokenizer.bos_token_id,) if token is not None and tokenizer("a").input_ids[0] == token]
    assert ids.count(tokenizer.bos_token_id) == len(bos) and ids[: len(bos)] == bos


def trained_groups(labels: list[int], end: int) -> list[list[int]]:
    """The trained tokens of each answer: each group ends in the end token, nothing is trained outside."""
    groups, current = [], []
    for label in labels:
        if label != chat.IGNORE:
            current.append(label)
            if label == end:
                groups.append(current)
                current = []
        else:
            assert not current, "an answer was interrupted or has no end token"
    assert not current
    return groups


@pytest.mark.parametrize("name", [name for name in LOSSLESS if "ChatML" not in name])
def test_whole_decodes_to_the_text_with_end_tokens(name):
    tokenizer = build(name)
    dialogue = turns("what is two?", "it is two.", "and  three?\nplease")
    ids, _ = chat.encode_dialogue(tokenizer, dialogue, "five")
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    expected = (
        "\n\nHuman: what is two?\n\nAssistant: it is two.</s>\n\nHuman: and  three?\nplease\n\nAssistant: five</s>"
    )
    assert text in (expected, "<s>" + expected, "<s> " + expected)


@pytest.mark.parametrize("name", [name for name in ALL if "ChatML" not in name])
def test_one_turn_is_what_the_tokenizer_makes_of_the_text(name):
    tokenizer = build(name)
    prompt = "\n\nHuman: what is two plus three?\n\nAssistant:"
    expected = tokenizer(prompt, add_special_tokens=True).input_ids
    if name == "WordPiece":
        expected = expected[:-1]  # its [SEP] ends a text
    assert chat.encode_prompt(tokenizer, {"prompt": prompt}) == expected
    ids, _ = chat.encode_dialogue(tokenizer, {"prompt": prompt}, "it is five.")
    whole = tokenizer(prompt + " it is five.").input_ids
    assert ids[:-1] == (whole[:-1] if name == "WordPiece" else whole)


def test_template_ids_are_those_of_apply_chat_template():
    tokenizer = byte_level_fast(template=CHATML, eos="<|im_end|>")
    dialogue = [{"role": "system", "content": "be brief"}, *turns("hello", "good day", "what is two?")]
    stock = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=False)
    assert chat.encode_prompt(tokenizer, dialogue) == stock
    whole = tokenizer.apply_chat_template([*dialogue, {"role": "assistant", "content": "yes"}], return_dict=False)
    ids, labels = chat.encode_dialogue(tokenizer, dialogue, "yes")
    assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]) == "\n"
    assert tokenizer.decode([token for token in labels if token >= 0]) == "good day<|im_end|>yes<|im_end|>"


def test_end_token_is_the_templates_own():
    tokenizer = byte_level_fast(template=CHATML)  # EOS is </s>, the template ends turns with <|im_end|>
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.end_token_id(tokenizer) == end
    assert chat.stop_token_ids(tokenizer) == [end, tokenizer.eos_token_id]


def test_template_without_an_end_token_gets_eos():
    template = (
        "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer = byte_level_fast(template=template)
    ids, labels = chat.encode_dialogue(tokenizer, turns("hello", "good", "day"), "yes")
    assert tokenizer.decode(ids) == "[user] hello\n[assistant] good</s>\n[user] day\n[assistant] yes</s>"
    assert tokenizer.decode([token for token in labels if token >= 0]) == "good</s>yes</s>"


def test_template_that_writes_bos_does_not_get_two():
    tokenizer = byte_level_fast(bos=True, template="{{ bos_token }}" + CHATML, eos="<|im_end|>")
    assert chat.encode_prompt(tokenizer, turns("hello")).count(tokenizer.bos_token_id) == 1


def test_template_refusing_roles_is_named():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML
    tokenizer = byte_level_fast(template=template)
    with pytest.raises(ValueError, match="refuses the roles system, user.*no system here"):
        chat.encode_prompt(tokenizer, [{"role": "system", "content": "x"}, *turns("hello")])


def test_template_dropping_a_turn_is_named():
    template = "{% for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content }}{% endfor %}"
    tokenizer = byte_level_fast(template=template)
    with pytest.raises(ValueError, match=r"leaves out turn 0 \(system\)"):
        chat.encode_prompt(tokenizer, [{"role": "system", "content": "x"}, *turns("hello")])


def test_control_token_text_stays_text():
    for tokenizer in (byte_level_fast(template=CHATML, eos="<|im_end|>"), sentencepiece_fast()):
        end = chat.end_token_id(tokenizer)
        text = tokenizer.convert_ids_to_tokens(end)
        ids, labels = chat.encode_dialogue(tokenizer, turns(f"say {text} now"), f"no {text} here")
        plain, _ = chat.encode_dialogue(tokenizer, turns("say it now"), "no it here")
        assert ids.count(end) == plain.count(end)
        assert labels.count(end) == 1
        assert text in tokenizer.decode([token for token in ids if token != end])


@pytest.mark.parametrize("make", [unigram_fast, words_fast, lambda: words_fast(models.WordPiece)])
def test_control_tokens_that_are_words_of_the_vocabulary_are_not_found_in_texts(make):
    tokenizer = make()
    ids, labels = chat.encode_dialogue(tokenizer, turns("say </s> <s> now"), "no </s> here")
    own = [token for token in labels if token != chat.IGNORE]
    assert ids.count(tokenizer.eos_token_id) == own.count(tokenizer.eos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<s>") not in ids
    expected = "no </s> here" if make is unigram_fast else "no <unk> here"
    assert tokenizer.decode(own[:-1]).strip() == expected


def test_delimiters_added_as_plain_tokens_are_not_found_in_texts():
    tokenizer = plainly_added_fast()
    start, end, think = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>", "<think>"))
    dialogue = turns("say <|im_end|> now <|im_start|>")
    ids, labels = chat.encode_dialogue(tokenizer, dialogue, "<think>no <|im_end|> here")
    assert (ids.count(start), ids.count(end)) == (2, 2)
    own = [token for token in labels if token != chat.IGNORE]
    assert own[0] == think, "a plain added token that is no delimiter stays a token"
    assert own.count(end) == 1 and tokenizer.decode(own) == "<think>no <|im_end|> here<|im_end|>"
    assert chat.encode_prompt(tokenizer, turns("hello")) == tokenizer.apply_chat_template(
        turns("hello"), add_generation_prompt=True, return_dict=False
    )


def test_marker_of_the_next_turn_is_no_end_token():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    tokenizer = byte_level_fast(template=template)
    ids, _ = chat.encode_dialogue(tokenizer, turns("hello", "good", "day"), "yes")
    assert tokenizer.decode(ids) == (
        "<|im_start|>user hello<|im_start|>assistant good</s><|im_start|>user day<|im_start|>assistant yes</s>"
    )


def test_marker_text_inside_a_turn_stays_inside():
    tokenizer = build("byte-level, ChatML")
    inner = "look:\n\nAssistant: I am no turn"
    ids, labels = chat.encode_dialogue(tokenizer, turns(inner), "yes")
    assert tokenizer.decode(ids).count("<|im_start|>") == 2
    assert inner in tokenizer.decode(ids)


def test_changed_template_is_noticed():
    tokenizer = byte_level_fast()
    before = chat.encode_prompt(tokenizer, turns("hello"))
    tokenizer.chat_template = CHATML
    assert chat.encode_prompt(tokenizer, turns("hello")) != before


def test_template_from_a_file(tmp_path):
    tokenizer = byte_level_fast()
    (tmp_path / "chatml.jinja").write_text(CHATML)
    chat.use_template_file(tokenizer, tmp_path / "chatml.jinja")
    assert tokenizer.decode(chat.encode_prompt(tokenizer, turns("hi"))).startswith("<|im_start|>user\nhi")
    with pytest.raises(FileNotFoundError, match="no chat template at"):
        chat.use_template_file(tokenizer, tmp_path / "no.jinja")
    for content, named in ((b" \n", "is empty: leave it out"), (b"{# \xe9 #}", "is not UTF-8 at byte 3: save it")):
        (tmp_path / "chatml.jinja").write_bytes(content)
        with pytest.raises(ValueError, match=f"chatml.jinja: the chat template {named}"):
            chat.use_template_file(tokenizer, tmp_path / "chatml.jinja")


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ 1 / 0 }}", "refuses the roles user, assistant: division by zero"),
        ("{{ messages + 1 }}", "refuses the roles user, assistant: can only concatenate"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the roles user, assistant: maximum recursion"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "leaves out or changes the text of an answer"),
        ("{{ messages[0].content }}", "leaves out or changes the text of an answer"),
    ],
)
def test_a_template_that_fails_is_named(template, named):
    with pytest.raises(ValueError, match=f"^the chat template {named}"):
        chat.encode_prompt(byte_level_fast(template=template), turns("hello"))


def test_no_end_token_is_an_error():
    tokenizer = byte_level_fast(eos=None)
    with pytest.raises(ValueError, match="no end token.*eos_token"):
        chat.encode_prompt(tokenizer, turns("hello"))


def test_render_takes_rows_turns_and_text():
    tokenizer = build("byte-level")
    row = {"prompt": "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: two?\n\nAssistant:", "response": "three"}
    ids, trained = chat.render(row, tokenizer)
    assert (ids, trained) == chat.render(turns("hi", "yes", "two?", "three"), tokenizer)
    assert (ids, trained) == chat.render(row["prompt"] + " three", tokenizer)
    assert (ids, trained) == chat.render(row["prompt"] + " three\n\nHuman: left open", tokenizer)
    own = [token for token, is_own in zip(ids, trained, strict=True) if is_own]
    assert tokenizer.decode(own) == " yes</s> three</s>"
    with pytest.raises(ValueError, match="no assistant turn"):
        chat.render("\n\nHuman: hi", tokenizer)


def test_decode_response_stops_at_the_first_end_token():
    tokenizer = build("byte-level, pad = eos")
    ids = tokenizer("yes").input_ids
    end = chat.end_token_id(tokenizer)
    assert chat.decode_response(tokenizer, [*ids, end, *ids, end, end]) == "yes"
    assert chat.decode_response(tokenizer, [end, end]) == ""
    assert chat.decode_response(tokenizer, []) == ""


class TestMarkers:
    def test_parse(self):
        text = "\n\nHuman: one\n\nAssistant: two\n\nHuman:three \n\nAssistant:"
        assert chat.parse_dialogue(text) == turns("one", "two", "three")

    def test_preface_is_a_system_turn(self):
        assert chat.parse_dialogue("Be kind.\n\nHuman: hi")[0] == {"role": "system", "content": "Be kind."}

    def test_first_marker_may_have_lost_its_blank_line(self):
        assert chat.parse_dialogue("Human: hi\n\nAssistant: yes") == turns("hi", "yes")

    def test_plain_text_is_a_question(self):
        assert chat.parse_dialogue("Human: the species\nAssistant: a job") == turns(
            "Human: the species\nAssistant: a job"
        )

    def test_there_and_back(self):
        dialogue = [{"role": "system", "content": "s"}, *turns("a", "b", "")]
        assert chat.parse_dialogue(chat.turns_to_text(dialogue)) == dialogue


class TestTrainedParts:
    def trained(self, tokenizer, dialogue):
        ids, own = chat.render(dialogue, tokenizer)
        return tokenizer.decode([token for token, is_own in zip(ids, own, strict=True) if is_own])

    def test_turns_marked_as_context_are_not_trained(self):
        dialogue = turns("a", "one", "b", "two")
        dialogue[1]["train"] = False
        for name, expected in (("byte-level", " two</s>"), ("byte-level, ChatML", "two<|im_end|>")):
            assert self.trained(build(name), dialogue) == expected
            assert chat.render(dialogue, build(name))[0] == chat.render(turns("a", "one", "b", "two"), build(name))[0]

    def test_generation_marks_of_a_template_are_kept(self):
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
            "{% if m.role == 'assistant' %}{{ '(thinking)' }}{% generation %}{{ m.content + '<|im_end|>' }}"
            "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        tokenizer = byte_level_fast(template=template, eos="<|im_end|>")
        dialogue = turns("a", "one", "b", "two")
        assert self.trained(tokenizer, dialogue) == "one<|im_end|>two<|im_end|>"
        stock = tokenizer.apply_chat_template(dialogue, return_assistant_tokens_mask=True, return_dict=True)
        ids, own = chat.render(dialogue, tokenizer)
        assert ids == stock["input_ids"][: len(ids)]
        assert [int(is_own) for is_own in own] == stock["assistant_masks"][: len(ids)]
        assert ids[: len(chat.encode_prompt(tokenizer, dialogue[:3]))] == chat.encode_prompt(tokenizer, dialogue[:3])

    def test_what_a_template_writes_before_an_answer_is_the_models_to_write(self):
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
            "{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        tokenizer = byte_level_fast(template=template, eos="<|im_end|>")
        assert self.trained(tokenizer, turns("a", "one", "b", "two")) == "one<|im_end|><think></think>two<|im_end|>"

    def test_template_with_no_generation_prompt_and_the_system_text_inside_the_question(self):
        template = (
            "{% if messages[0].role == 'system' %}"
            "{% set system = messages[0].content + ' ' %}{% set rest = messages[1:] %}"
            "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}"
            "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}"
            "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
            "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
        )
        tokenizer = sentencepiece_fast()
        tokenizer.chat_template = template
        dialogue = [{"role": "system", "content": "be kind"}, *turns("hi", "good", "day", "yes")]
        ids, own = chat.render(dialogue, tokenizer)
        text = "<s> [INST] be kind hi [/INST] good</s>[INST] day [/INST] yes</s>"
        assert tokenizer.decode(ids) == text.replace("<s> ", "<s>") or tokenizer.decode(ids) == text
        assert self.trained(tokenizer, dialogue) == "good</s> yes</s>"
        assert ids[: len(chat.encode_prompt(tokenizer, dialogue[:4]))] == chat.encode_prompt(tokenizer, dialogue[:4])
        with pytest.raises(ValueError, match="roles must alternate"):
            chat.encode_prompt(tokenizer, turns("a", "b")[::-1])

    def test_template_that_cannot_be_empty_may_begin_with_the_assistant(self):
        template = "{% if messages[0].role == 'system' %}{{ 'S' }}{% endif %}" + CHATML
        tokenizer = byte_level_fast(template=template, eos="<|im_end|>")
        dialogue = [{"role": "assistant", "content": "welcome"}, *turns("hi", "good")]
        assert self.trained(tokenizer, dialogue) == "welcome<|im_end|>good<|im_end|>"
