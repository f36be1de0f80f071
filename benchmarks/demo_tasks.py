"""python -m benchmarks.demo_tasks: writes the items of the lm-eval group `apex_demo`, from the bundled model's held-out text.

- perplexity: documents of whole lines, short enough for the 256 tokens the model was trained at.
- continuation: whole lines up to a space in mid-phrase, and four passages of eight words that follow such a space: the one that
  comes next, and three from elsewhere in the text whose tokens are about as common. No two overlap.
- cloze: whole lines up to a word that often comes after the word before it, and that word. None has more than a tenth of the
  items.
- reference: whole verses and `Rev`, and the number of the next verse (`1:4`), in the same chapter.

Only the text decides which items there are, never a model's answers; the tokenizer cuts it into tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from bisect import bisect_left
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from apex_engine.cli.console import run
from apex_engine.eval.texts import domains
from apex_engine.quantize.source.names import resolve

FOLDER = Path(__file__).resolve().parent.parent / "eval" / "tasks" / "apex_demo"
DOCUMENTS, CONTINUATIONS, CLOZES, REFERENCES = 40, 300, 300, 100  # items a domain
DOCUMENT, CONTEXT = 250, 176  # tokens at most
NEAR = 12  # passages nearest in rarity to the right one, of which three are drawn

SAID = {"kjv": r"^Rev\S+ (.+)$", "drama": r"^[A-Z][A-Z ]+\.\n((?:.+\n)+)"}  # group 1: what a verse or a speaker says
PASSAGE = re.compile(r"(?<=[a-z] )(?=[a-z])(?:[^\s\[\]]+\s+){7}[^\s\[\]]+")  # no stage direction in it
VERSE = re.compile(r"^Rev((\d+):\d+)", re.MULTILINE)

Item = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.demo_tasks")
    p.add_argument("--check", action="store_true", help="write nothing; fail if a file is not what would be written")
    check = p.parse_args(arguments).check
    made = files()
    for name, content in made.items():
        path = FOLDER / name
        if not check:
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            raise SystemExit(f"{path} is not what `python -m benchmarks.demo_tasks` writes")
    if others := [path for path in FOLDER.glob("*.jsonl") if path.name not in made]:
        raise SystemExit(f"{others[0]} is not what `python -m benchmarks.demo_tasks` writes")


def files() -> dict[str, bytes]:
    """File name -> content: one item a line, as JSON."""
    folder = resolve("tiny")
    tokenizer, all_texts = AutoTokenizer.from_pretrained(folder), domains(folder)
    texts = {name: Text(all_texts[name], said, tokenizer) for name, said in SAID.items()}
    made = {"reference": references(texts["kjv"])}
    for name, text in texts.items():
        made[f"perplexity_{name}"] = documents(text)
        made[f"continuation_{name}"] = continuations(text)
        made[f"cloze_{name}"] = clozes(text)
    return {f"{name}.jsonl": b"".join(json.dumps(i).encode() + b"\n" for i in items) for name, items in made.items()}


class Text:
    """A text, where its lines begin, where its passages are, and its tokens."""

    def __init__(self, text: str, said: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = text
        self.lines = [match.start() for match in re.finditer(r"^(?=.)", text, re.MULTILINE)]  # without empty ones
        blocks = re.finditer(said, text, re.MULTILINE)
        self.passages = {m[0]: m.span() for block in blocks for m in PASSAGE.finditer(text, *block.span(1))}
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
        ids, counts = encoded["input_ids"], Counter(encoded["input_ids"])
        self._starts = [start for start, _ in encoded["offset_mapping"]]
        self._rarity = [0.0, *accumulate(math.log(len(ids) / counts[token]) for token in ids)]

    def tokens(self, start: int, end: int) -> int:
        return bisect_left(self._starts, end) - bisect_left(self._starts, start)

    def rarity(self, start: int, end: int) -> float:
        """Nats of the tokens there, by their frequencies in the text."""
        return self._rarity[bisect_left(self._starts, end)] - self._rarity[bisect_left(self._starts, start)]

    def context(self, end: int) -> int:
        """Where the longest run of whole lines begins that has at most CONTEXT tokens up to `end`."""
        return self.lines[bisect_left(self.lines, True, key=lambda start: self.tokens(start, end) <= CONTEXT)]


def documents(text: Text) -> list[Item]:
    made: list[Item] = []
    start = end = 0
    for bound in [*text.lines[1:], len(text.text)]:
        if text.tokens(start, bound) > DOCUMENT:
            made.append({"text": text.text[start:end].rstrip("\n")})
            start = end
        end = bound
    return spread(made, DOCUMENTS)


def continuations(text: Text) -> list[Item]:
    rarity = {words: text.rarity(*span) for words, span in text.passages.items()}
    rng, made = random.Random(0), []
    for gold, (place, end) in text.passages.items():
        start = text.context(place)
        others = [words for words, (a, b) in text.passages.items() if b <= start or a >= end]
        near = sorted(others, key=lambda words: abs(rarity[words] - rarity[gold]))[:NEAR]
        choices = shuffled([gold, *shuffled(near, rng)[:3]], rng)
        if start > 0:
            made.append({"context": text.text[start : place - 1], "choices": choices, "gold": choices.index(gold)})
    return spread(made, CONTINUATIONS)


def clozes(text: Text) -> list[Item]:
    """No word that a passage ends with: of requests that differ in their last token alone, lm-eval 0.4.13 computes one and
    takes the others' logits from it as if all had asked for as many tokens.
    """
    ends = {end for _, end in text.passages.values()}
    words = list(pairwise(re.finditer(r"[A-Za-z']+", text.text)))
    counts, pairs = Counter(before[0] for before, _ in words), Counter((before[0], word[0]) for before, word in words)
    drawn: Counter[str] = Counter()
    made = {}
    for before, word in shuffled(words, random.Random(0)):
        start = text.context(word.start())
        in_phrase = text.text[before.end() : word.start()] == " " and re.fullmatch("[a-z]{3,}", word[0])
        often = pairs[before[0], word[0]] >= max(3, counts[before[0]] / 10)
        if start > 0 and word.end() not in ends and in_phrase and often and drawn[word[0]] < CLOZES // 10:
            drawn[word[0]] += 1
            made[word.start()] = {"context": text.text[start : before.end()], "word": word[0]}
    return spread([made[place] for place in sorted(made)], CLOZES)


def references(text: Text) -> list[Item]:
    made = []
    for before, verse in pairwise(VERSE.finditer(text.text)):
        start = text.context(verse.start())
        if before[2] == verse[2] and start < before.start():
            made.append({"context": text.text[start : verse.start(1)], "verse": verse[1]})
    return spread(made, REFERENCES)


def spread(items: list[Item], count: int) -> list[Item]:
    """`count` of the items, at equal distances."""
    assert len(items) >= count
    return [items[i * len(items) // count] for i in range(count)]


def shuffled(items: list[Any], rng: random.Random) -> list[Any]:
    """By `rng.random` alone, whose numbers are the same in every version of Python."""
    return sorted(items, key=lambda _: rng.random())


if __name__ == "__main__":
    run(main)
