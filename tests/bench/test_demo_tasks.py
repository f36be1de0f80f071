import json
import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

from apex_engine.eval.texts import domains
from benchmarks import demo_tasks
from benchmarks.demo_tasks import FOLDER

DOMAINS = ["kjv", "drama"]


@pytest.fixture(scope="module")
def texts(bundled):
    return domains(bundled)


@pytest.fixture(scope="module")
def tokens(bundled):
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    return lambda text: len(tokenizer(text)["input_ids"])


def items(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("made", [{}, {"a.jsonl": b"1"}, {"a.jsonl": b"0", "b.jsonl": b""}])
def test_a_file_that_is_not_the_generators_fails_the_check(made, tmp_path, monkeypatch):
    """That the committed ones are is shown by `demo_tasks --check` among the commands of the docs."""
    monkeypatch.setattr(demo_tasks, "FOLDER", tmp_path)
    monkeypatch.setattr(demo_tasks, "files", lambda: made)
    (tmp_path / "a.jsonl").write_bytes(b"0")
    with pytest.raises(SystemExit, match="is not what"):
        demo_tasks.main(["--check"])


def test_the_committed_files_are_small():
    assert 0 < sum(path.stat().st_size for path in FOLDER.glob("*.jsonl")) < 1_200_000


@pytest.mark.parametrize("domain", DOMAINS)
def test_documents_fit_beside_a_prefix_token(domain, texts, tokens):
    found = [item["text"] for item in items(f"perplexity_{domain}")]
    assert len(set(found)) == 40
    assert all(f"{document}\n" in texts[domain] and 150 < tokens(document) <= 255 for document in found)


@pytest.mark.parametrize("domain", DOMAINS)
def test_one_choice_continues_the_context_and_the_others_are_from_elsewhere(domain, texts, tokens):
    found = items(f"continuation_{domain}")
    assert len({item["context"] for item in found}) == 300
    places = Counter(item["gold"] for item in found)
    assert sorted(places) == [0, 1, 2, 3] and all(60 <= count <= 90 for count in places.values())
    for item in found:
        choices, gold = item["choices"], item["choices"][item["gold"]]
        whole = f"{item['context']} {gold}"
        start = texts[domain].index(whole)
        assert texts[domain][start - 1] == "\n" and tokens(whole) <= 255
        assert len(set(choices)) == 4
        for choice in choices:
            assert len(choice.split()) == 8 and choice[0].islower()
            elsewhere = [(a, a + len(choice)) for a in found_at(choice, texts[domain])]
            assert choice == gold or any(b <= start or a >= start + len(whole) for a, b in elsewhere)


def found_at(passage, text):
    """Where it begins in mid-phrase."""
    at = text.find(passage)
    while at >= 0:
        if re.fullmatch("[a-z] ", text[max(at - 2, 0) : at]):
            yield at
        at = text.find(passage, at + 1)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_cloze_word_follows_its_context(domain, texts, tokens):
    found = items(f"cloze_{domain}")
    assert len(found) == 300
    assert all(f"\n{item['context']} {item['word']}" in texts[domain] for item in found)
    assert all(tokens(f"{item['context']} {item['word']}") <= 255 for item in found)
    assert max(Counter(item["word"] for item in found).values()) <= 30


def test_no_request_of_the_group_differs_from_another_in_its_last_token_alone(bundled):
    """lm-eval would mix up their logits."""
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    asked = [(i["context"], word) for d in DOMAINS for i in items(f"continuation_{d}") for word in i["choices"]]
    asked += [(item["context"], item["word"]) for domain in DOMAINS for item in items(f"cloze_{domain}")]
    ids = [tuple(ids[:-1]) for ids in tokenizer([f"{context} {word}" for context, word in asked])["input_ids"]]
    assert len(set(ids)) == len(ids)


def test_a_reference_is_the_next_in_its_chapter(texts):
    found = items("reference")
    assert len({item["verse"] for item in found}) == 100
    for item in found:
        assert f"{item['context']}{item['verse']} " in texts["kjv"]
        chapter, verse = item["verse"].split(":")
        assert re.findall(r"^Rev(\S+) ", item["context"], re.MULTILINE)[-1] == f"{chapter}:{int(verse) - 1}"


def test_lm_eval_loads_the_group_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    manager = pytest.importorskip("lm_eval.tasks").TaskManager(include_path=str(FOLDER.parent), include_defaults=False)
    assert manager.all_groups == ["apex_demo"]
    tasks = manager.load(["apex_demo"])["tasks"]
    assert sorted(tasks) == sorted(manager.all_subtasks)
    assert {name: len(task.eval_docs) for name, task in tasks.items()} == {
        **{f"apex_demo_perplexity_{domain}": 40 for domain in DOMAINS},
        **{f"apex_demo_continuation_{domain}": 300 for domain in DOMAINS},
        **{f"apex_demo_cloze_{domain}": 300 for domain in DOMAINS},
        "apex_demo_reference": 100,
    }
    assert requests(tasks["apex_demo_cloze_kjv"]) == [f"{i['context']}| {i['word']}" for i in items("cloze_kjv")[:1]]
    first = items("continuation_drama")[0]
    choices = [f"{first['context']}| {choice}" for choice in first["choices"]]
    assert requests(tasks["apex_demo_continuation_drama"])[:4] == choices


def requests(task):
    """Context and continuation of the first document, as a model gets them."""
    task.build_all_requests(limit=1, rank=0, world_size=1)
    return ["|".join(request.args) for request in task.instances]
