"""Prompts are read as they are meant, and what can't be read is reported by its line and left out."""

import json

import pytest

from mla_backend.engine import Completion, Result, SamplingParams
from mla_backend.engine.sampler import TokenLogprobs
from mla_backend.generate.prompts import Item, Shape, read
from mla_backend.generate.results import ResultFile, for_people, record

DEFAULTS = SamplingParams(max_tokens=7)


def read_json(*lines, **more):
    return read([line if isinstance(line, str) else json.dumps(line) for line in lines], DEFAULTS, **more)


def batch(body, url="/v1/chat/completions", **more):
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}, **more}


CHAT = [{"role": "user", "content": "hi"}]


def test_a_text_file_has_a_prompt_a_line():
    items, bad = read(["one\n", "\n", "  two\r\n", "three"], DEFAULTS)
    assert not bad
    found = [(item.number, item.id, item.prompt) for item in items]
    assert found == [(1, "1", "one"), (3, "3", "  two"), (4, "4", "three")]
    assert all(item.params == DEFAULTS and item.shape is Shape.PLAIN for item in items)


def test_texts_become_conversations_if_asked_to():
    items, _ = read(["hi"], DEFAULTS, chat=True)
    assert items[0].prompt == CHAT
    items, _ = read_json({"tokens": [1, 2]}, {"messages": CHAT}, chat=True)
    assert [item.prompt for item in items] == [[1, 2], CHAT]


def test_the_format_is_seen_from_the_first_line_or_said():
    assert read(['{"prompt": "x"}'], DEFAULTS)[0][0].prompt == "x"
    assert read(['{"prompt": "x"}'], DEFAULTS, jsonl=False)[0][0].prompt == '{"prompt": "x"}'
    assert read(["x"], DEFAULTS, jsonl=True)[1][0].number == 1


def test_a_line_of_json_says_what_differs_from_the_options():
    items, bad = read_json(
        {"prompt": "x", "id": "p", "temperature": 0.5, "stop": "END", "stop_token_ids": [3], "seed": None, "n": 2},
        {"tokens": [1, 2], "id": 5, "stop": ["a", "b"], "logprobs": 2},
    )
    assert not bad
    wanted = SamplingParams(max_tokens=7, temperature=0.5, stop=("END",), stop_tokens=(3,), n=2)
    assert items[0].id == "p" and items[0].params == wanted and items[1].id == "5" and items[1].prompt == [1, 2]
    assert items[1].params == SamplingParams(max_tokens=7, stop=("a", "b"), logprobs=2)


def test_openais_batch_requests_are_taken():
    items, bad = read_json(
        batch({"messages": CHAT, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "user": "u"}),
        batch({"prompt": "x", "max_tokens": 4, "logprobs": 1}, url="/v1/completions", custom_id="b"),
        batch({"messages": CHAT, "logprobs": False, "stream": False, "frequency_penalty": 0.0}, custom_id="c"),
    )
    assert not bad
    kinds = [(item.id, item.shape, item.prompt) for item in items]
    assert kinds == [("a", Shape.CHAT, CHAT), ("b", Shape.COMPLETION, "x"), ("c", Shape.CHAT, CHAT)]
    assert {item.model for item in items} == {"m"}
    assert [(item.params.max_tokens, item.params.logprobs) for item in items] == [(3, 2), (4, 1), (7, None)]


@pytest.mark.parametrize(
    "line, why",
    [
        ('{"prompt": "x"', "not JSON: Expecting"),
        ("[1]", "must be an object {...}; got [1]"),
        ({}, "must have one of prompt, messages, tokens; got none"),
        ({"prompt": "x", "tokens": [1]}, "must have one of prompt, messages, tokens; got prompt and tokens"),
        ({"prompt": ""}, 'prompt must be a text that isn\'t empty, or tokens; got ""'),
        ({"prompt": ["x", "y"]}, 'prompt must be a text that isn\'t empty, or tokens; got ["x", "y"]'),
        ({"tokens": "x"}, 'tokens must be one or more token ids; got "x"'),
        ({"messages": []}, "messages must be one or more objects with a role and a content, both texts"),
        ({"messages": [{"role": "user"}]}, "messages must be one or more objects"),
        ({"prompt": "x", "id": True}, "id must be a text or a number; got True"),
        ({"prompt": "x", "temperature": -1}, "temperature must be 0 or more; got -1"),
        ({"prompt": "x", "temperatur": 1}, "temperatur is not a known field"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens must be an int; got str"),
        ({"prompt": "x", "stop": 3}, "stop must be texts"),
        (batch({"messages": CHAT}, custom_id=3), "custom_id must be a text that isn't empty; got 3"),
        (batch({"messages": CHAT}, url="/v1/embeddings"), "url must be one of /v1/chat/completions, /v1/completions"),
        (batch({"messages": CHAT}, method="GET"), "method must be POST; got 'GET'"),
        (batch({"prompt": "x"}), "body must have messages for /v1/chat/completions; it has model, prompt"),
        ({"custom_id": "a", "url": "/v1/completions", "body": []}, "body must be an object {...}; got []"),
        (batch({"messages": CHAT, "frequency_penalty": 0.5}), "frequency_penalty must be 0 or left out; got 0.5"),
        (batch({"messages": CHAT, "tools": [{}]}), "tools must be [] or left out; got [{}]"),
        ('{"prompt": "\\ud800"}', ""),
        ('{"prompt": "x", "id": "\\udfff"}', ""),
        ('{"messages": [{"role": "\\ud800", "content": "x"}]}', ""),
        ('{"prompt": "x", "temperature": ' + "9" * 401 + "}", ""),
        ({"prompt": "x", "repetition_penalty": 10**300}, ""),
        ({"prompt": "x", "repetition_penalty": 1e-300}, ""),
        pytest.param('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "", id="nested"),
        (b'{"prompt": "\xff"}', ""),
        (batch({"prompt": "x"}, url=[]), ""),
        (batch({"prompt": "x", "model": "\ud800"}, url="/v1/completions"), ""),
    ],
)
def test_bad_lines_are_reported_and_dont_stop_the_rest(line, why):
    line = line if isinstance(line, str | bytes) else json.dumps(line)
    line = line if isinstance(line, bytes) else line.encode()
    items, bad = read([b'{"prompt": "before"}\n', line + b"\n", b'{"prompt": "after"}\n'], DEFAULTS)
    assert [item.prompt for item in items] == ["before", "after"]
    assert [b.number for b in bad] == [2] and why in bad[0].why
    bad[0].why.encode()


def test_an_id_that_stands_twice_is_a_bad_line():
    items, bad = read_json({"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"})
    assert [item.prompt for item in items] == ["x"]
    assert bad[0].number == 2 and bad[0].why == "id 'a' is that of line 1, too"


def result(id: str) -> Result:
    return Result(id, 3, 1, [Completion(0, "ab", [5, 6], [TokenLogprobs(-0.5, ((5, -0.5),))] * 2, "stop")])


def test_plain_requests_are_answered_plainly():
    item = Item(1, "p", "x", DEFAULTS)
    line = record(item, result("p"), lambda tokens: f"<{tokens[0]}>")
    best = {"token": "<5>", "token_id": 5, "logprob": -0.5}
    entries = [{**best, "top_logprobs": [best]}, {**best, "token": "<6>", "token_id": 6, "top_logprobs": [best]}]
    completion = {"text": "ab", "finish_reason": "stop", "tokens": [5, 6], "logprobs": entries}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
    assert line == {"id": "p", "prompt": "x", "completions": [completion], "usage": usage, "digest": item.digest}
    assert record(Item(1, "p", CHAT, DEFAULTS), result("p"), None)["messages"] == CHAT
    assert record(Item(1, "p", [1], DEFAULTS), result("p"), None)["tokens"] == [1]


def test_batch_requests_are_answered_in_kind():
    line = record(Item(1, "c", CHAT, DEFAULTS, Shape.CHAT, "m"), result("c"), None)
    body = line["response"]["body"]
    assert line["custom_id"] == "c" and line["error"] is None and line["response"]["status_code"] == 200
    assert body["object"] == "chat.completion" and body["model"] == "m"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "ab"} and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == 2
    assert body["usage"]["total_tokens"] == 5 and body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    completion = record(Item(1, "c", "x", DEFAULTS, Shape.COMPLETION), result("c"), None)["response"]["body"]
    assert completion["object"] == "text_completion" and completion["choices"][0]["text"] == "ab"


def test_digests_tell_requests_apart():
    item = Item(1, "p", "x", DEFAULTS)
    assert item.digest == Item(9, "q", "x", DEFAULTS).digest
    assert item.digest not in {Item(1, "p", "y", DEFAULTS).digest, Item(1, "p", "x", SamplingParams()).digest}


def test_a_result_file_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "out.jsonl"
    first = ResultFile(path, resume=False)
    for id in "ab":
        first.write({"id": id, "digest": "d" + id})
    with pytest.raises(ValueError, match="--output .* is being written by someone else"):
        ResultFile(path, resume=True)
    first.close()
    with open(path, "a") as file:
        file.write('{"id": "c", "dig')
    with pytest.raises(ValueError, match="--output .* has something in it; --resume goes on with it"):
        ResultFile(path, resume=False)
    again = ResultFile(path, resume=True)
    assert again.finished == {"a": "da", "b": "db"}
    again.write({"id": "c", "digest": "dc"})
    again.close()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_a_missing_folder_is_named_and_not_made(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path / "missing")):
        ResultFile(tmp_path / "missing" / "out.jsonl", resume=False)
    assert not (tmp_path / "missing").exists()


def test_people_see_whose_text_it_is_and_a_terminal_gets_no_commands():
    item, found = Item(1, "p", CHAT, DEFAULTS), result("p")
    assert for_people(item, found, alone=True) == "ab\n"
    found.completions = [Completion(0, "first\tline\n\x1b[2J", [5], [], "stop"), Completion(1, "", [5, 6], [], "stop")]
    text = for_people(item, found, alone=False)
    assert "hi" in text and "first\tline\n\\x1b[2J\n" in text and "5 6" in text
