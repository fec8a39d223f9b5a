"""Write the demo's synthetic sentence pairs: paraphrases, and near-misses that share just as many words.

    python examples/demo/pairs.py outputs/demo/data --seed 0

writes train.jsonl, validation.jsonl and test.jsonl with the columns sentence1, sentence2, label ("paraphrase"
or "different") and idx. Nobody wrote or collected these sentences: a small grammar makes them, so a number
measured on them is about this grammar and about nothing else.

How a pair is made. A scene is told twice, each time in another form: active or passive, the time in front
or at the end, "gave the child the cup" or "gave the cup to the child". In the second telling words are
exchanged.

- A paraphrase gets synonyms in their place, a near-miss words that mean something else. Which form, how many
  words and at which places is drawn in the same way for both.
- In one pair of 20 no word is exchanged: the paraphrase has the same words in another form, in the near-miss
  two of them have also changed places (agent and patient, two numbers, two adjectives, who did and who did
  not).

So the number of words that two sentences share has the same distribution for both labels, and counting words
does not help. Every fourth entry of the lists of words is kept out of training: the other splits have new
words. No sentence occurs in two pairs, neither within a split nor across two. One seed gives the same bytes
with every Python from 3.10 on, and only the standard library is used.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

SPLIT_SIZES = {"train": 1800, "validation": 300, "test": 400}
PARAPHRASE_SHARE = 0.55  # not one half, so that accuracy and F1 differ
SWAPPED_SHARE = 0.05  # where no word is exchanged


def synonyms(text: str) -> list[tuple[str, str]]:
    """Pairs of synonyms from "word/synonym word/synonym ..."."""
    return [(first, second) for first, second in (pair.split("/") for pair in text.split())]


# Synonyms; no two entries of a list mean the same. Past tenses are also participles, plurals end in s or es.
LISTS = {
    "person": synonyms(
        "doctor/physician lawyer/attorney teacher/instructor thief/robber writer/author boss/manager "
        "student/pupil guest/visitor child/kid singer/vocalist sailor/seaman king/monarch "
        "assistant/helper customer/client baby/infant merchant/trader cop/policeman actor/performer "
        "tourist/traveler woman/lady"
    ),
    "thing": synonyms(
        "car/automobile sofa/couch gift/present cup/mug picture/photo bike/bicycle stone/rock boat/ship "
        "phone/telephone bag/sack jacket/coat rug/carpet cap/hat box/crate plate/dish purse/handbag "
        "television/TV drawing/sketch bucket/pail jewel/gem"
    ),
    "deed": synonyms(
        "called/phoned helped/assisted warned/alerted hired/employed praised/commended hugged/embraced "
        "rescued/saved followed/trailed mocked/ridiculed noticed/spotted scolded/reprimanded injured/hurt "
        "comforted/consoled fired/dismissed cheated/swindled insulted/offended"
    ),
    "handling": synonyms(
        "bought/purchased found/discovered repaired/fixed wrecked/destroyed cleaned/washed lost/misplaced "
        "moved/shifted inspected/examined carried/transported picked/selected displayed/exhibited "
        "fetched/retrieved"
    ),
    "quality": synonyms(
        "big/large small/little old/ancient costly/expensive dirty/filthy strange/odd broken/damaged "
        "pretty/beautiful wet/soaked shiny/gleaming fake/counterfeit ugly/hideous"
    ),
    "number": synonyms("two/2 three/3 four/4 five/5 six/6 seven/7 eight/8 nine/9 ten/10 eleven/11 twelve/12"),
}
# Told the same way in both sentences.
TIMES = ["yesterday", "today", "recently", "once"]
TRANSFERS = [("gave", "given"), ("lent", "lent"), ("sold", "sold"), ("offered", "offered")]


class Scene(NamedTuple):
    """Lists that fill the slots, forms that tell them, and the two slots that a near-miss may swap."""

    slots: tuple[str, ...]
    forms: tuple[str, ...]
    swap: tuple[int, int] | None = None
    swap_kind: str = ""


SCENES = [
    Scene(
        ("person", "deed", "person"),
        (
            "the {0} {1} the {2} {time}",
            "{time}, the {0} {1} the {2}",
            "the {2} was {1} by the {0} {time}",
            "{time}, the {2} was {1} by the {0}",
            "it was the {0} who {1} the {2} {time}",
        ),
        (0, 2),
        "swapped agent and patient",
    ),
    Scene(
        ("person", "person", "thing"),
        (
            "the {0} {gave} the {1} the {2} {time}",
            "the {0} {gave} the {2} to the {1} {time}",
            "{time}, the {0} {gave} the {1} the {2}",
            "{time}, the {0} {gave} the {2} to the {1}",
            "the {2} was {given} to the {1} by the {0} {time}",
        ),
        (0, 1),
        "swapped giver and receiver",
    ),
    Scene(
        ("person", "handling", "quality", "thing"),
        (
            "the {0} {1} the {2} {3} {time}",
            "{time}, the {0} {1} the {2} {3}",
            "the {2} {3} was {1} by the {0} {time}",
            "{time}, the {2} {3} was {1} by the {0}",
            "it was the {2} {3} that the {0} {1} {time}",
        ),
    ),
    Scene(
        ("person", "handling", "number", "thing"),
        (
            "the {0} {1} {2} {3s} {time}",
            "{time}, the {0} {1} {2} {3s}",
            "{time}, {2} {3s} were {1} by the {0}",
            "it was {2} {3s} that the {0} {1} {time}",
        ),
    ),
    Scene(
        ("person", "handling", "quality", "thing", "quality", "thing"),
        (
            "the {0} {1} the {2} {3} and the {4} {5}",
            "the {0} {1} the {4} {5} and the {2} {3}",
            "the {2} {3} and the {4} {5} were {1} by the {0}",
        ),
        (2, 4),
        "swapped modifiers",
    ),
    Scene(
        ("person", "handling", "number", "thing", "number", "thing"),
        (
            "the {0} {1} {2} {3s} and {4} {5s}",
            "the {0} {1} {4} {5s} and {2} {3s}",
            "it was {2} {3s} and {4} {5s} that the {0} {1}",
        ),
        (2, 4),
        "swapped numbers",
    ),
    Scene(
        ("person", "person", "handling", "thing"),
        (
            "the {0} {2} the {3}, but the {1} did not",
            "the {0}, but not the {1}, {2} the {3}",
            "it was the {0}, not the {1}, who {2} the {3}",
            "the {3} was {2} by the {0} but not by the {1}",
        ),
        (0, 1),
        "moved negation",
    ),
]
T = TypeVar("T")


class Pair(NamedTuple):
    """One row, and what is not written: the places touched, and each sentence's words, sorted."""

    sentence1: str
    sentence2: str
    label: str
    kinds: tuple[str, ...]
    words: tuple[tuple[str, ...], tuple[str, ...]]


class Draws:
    """Random choices through `Random.random`, whose stream is the same in all versions of Python.

    The documentation promises that of no other method (`choice`, `sample` and `shuffle` may change).
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed).random

    def below(self, limit: int) -> int:
        return int(self.chance() * limit)

    def one(self, entries: Sequence[T]) -> T:
        return entries[self.below(len(entries))]

    def several(self, entries: Sequence[T], count: int) -> list[T]:
        """`count` different entries."""
        left = list(entries)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def tell(form: str, words: Sequence[str], fixed: dict[str, str]) -> str:
    plurals = {f"{i}s": word + ("es" if word.endswith(("ch", "sh", "x")) else "s") for i, word in enumerate(words)}
    for key, value in {**{str(i): word for i, word in enumerate(words)}, **plurals, **fixed}.items():
        form = form.replace("{" + key + "}", value)
    return form[0].upper() + form[1:] + "."


def draw_pair(draws: Draws, lists: dict[str, list[tuple[str, str]]], label: str) -> Pair:
    scene = draws.one(SCENES)
    gave, given = draws.one(TRANSFERS)
    fixed = {"time": draws.one(TIMES), "gave": gave, "given": given}
    form1, form2 = draws.several(scene.forms, 2)
    drawn = {name: draws.several(lists[name], 2 * scene.slots.count(name)) for name in sorted(set(scene.slots))}
    old = [drawn[name].pop() for name in scene.slots]  # the entry that fills each slot,
    new = [drawn[name].pop() for name in scene.slots]  # and one that the scene does not use, for a near-miss
    sides = [draws.below(2) for _ in scene.slots]
    words1 = [entry[side] for entry, side in zip(old, sides, strict=True)]
    words2 = list(words1)
    if scene.swap and draws.chance() < SWAPPED_SHARE * len(SCENES) / len([s for s in SCENES if s.swap]):
        kinds = (scene.swap_kind,)
        if label == "different":
            i, j = scene.swap
            words2[i], words2[j] = words2[j], words2[i]
    else:
        slots = len(scene.slots)
        count = 1 + max(draws.below(slots), draws.below(slots))  # one is the rarest, and the hardest
        places = draws.several(range(slots), count)
        kinds = tuple(f"other {scene.slots[place]}" for place in sorted(places))
        for place in places:
            words2[place] = (old if label == "paraphrase" else new)[place][1 - sides[place]]
    words = (tuple(sorted(words1)), tuple(sorted(words2)))
    return Pair(tell(form1, words1, fixed), tell(form2, words2, fixed), label, kinds, words)


def make_pairs(seed: int) -> dict[str, list[Pair]]:
    """All splits, a function of the seed alone; the share of paraphrases is the same in each."""
    draws = Draws(seed)
    used: set[tuple[str, ...]] = set()
    splits: dict[str, list[Pair]] = {}
    for split, size in SPLIT_SIZES.items():
        skipped = 3 if split == "train" else None
        lists = {name: [e for i, e in enumerate(entries) if i % 4 != skipped] for name, entries in LISTS.items()}
        pairs: list[Pair] = []
        paraphrases = round(PARAPHRASE_SHARE * size)  # still to be made
        while len(pairs) < size:
            label = "paraphrase" if draws.chance() * (size - len(pairs)) < paraphrases else "different"
            pair = draw_pair(draws, lists, label)
            if used.isdisjoint(pair.words):
                used.update(pair.words)
                pairs.append(pair)
                paraphrases -= label == "paraphrase"
        splits[split] = pairs
    return splits


def write_pairs(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in make_pairs(seed).items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
            for idx, pair in enumerate(pairs):
                row = {name: getattr(pair, name) for name in ("sentence1", "sentence2", "label")}
                file.write(json.dumps({**row, "idx": idx}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's synthetic sentence pairs as JSON lines.")
    parser.add_argument("output_dir", type=Path, help="folder for train.jsonl, validation.jsonl and test.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_pairs(arguments.output_dir, arguments.seed)
    sizes = ", ".join(f"{size:,} {split}" for split, size in SPLIT_SIZES.items())
    print(f"{arguments.output_dir}: synthetic sentence pairs, {sizes}")


if __name__ == "__main__":
    main()
