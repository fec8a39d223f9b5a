"""Write the demo's synthetic sentence pairs: paraphrases, and near-misses made of the same words.

    python examples/demo/pairs.py outputs/demo/data --seed 0

writes train.jsonl, validation.jsonl and test.jsonl with the columns sentence1, sentence2, label ("paraphrase" or
"different") and idx. Nobody wrote or collected these sentences: a small grammar makes them, so a number measured on
them is about this grammar and about nothing else.

How a pair is made. A scene has two things that can change places (who called whom, which number belongs to which
fruit) and can be told in several forms: active or passive, the time in front or at the end, a synonym of the verb.
Two different forms of one scene are a paraphrase; if the two things have changed places in the second form, the pair
is a near-miss. The forms are drawn in the same way for both labels, so that the words which two sentences share
follow the same distribution in both, and counting words does not help.

Every fourth word of most lists is kept out of training. No scene occurs twice, neither within a split nor across two.
The file depends on the standard library only, and one seed writes the same bytes with any Python from 3.10 on.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

SPLIT_SIZES = {"train": 1600, "validation": 300, "test": 400}
PARAPHRASE_SHARE = 0.55  # not one half, so that accuracy and F1 differ

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jacob Karen Leo Maria Noah Olivia Peter Rosa Simon Tara Victor "
    "Wendy Adam Bella Carl Diana Eric Fiona Gavin Helen Ivan Julia Kevin"
).split()
ROLES = (
    "nurse teacher baker lawyer pilot farmer doctor singer plumber waiter painter dentist judge driver tailor gardener "
    "actor cook student editor mayor guard clerk chemist"
).split()
PEOPLE = [person for name, role in zip(NAMES, ROLES) for person in (name, f"the {role}")] + NAMES[len(ROLES) :]
TIMES = [
    *("on Monday", "last week", "yesterday", "in April", "this morning", "last summer", "on Friday", "before lunch"),
    *("after the concert", "on Tuesday", "last night", "in October", "after the meeting", "during the break"),
    *("on Saturday", "last month"),
]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBERS = "two three four five six seven eight nine ten eleven twelve".split()
HOURS = "six seven eight nine ten eleven".split()
PRICES = "twenty thirty forty fifty sixty seventy eighty ninety".split()

# What one person does to another: the past tense, which is also the participle, and its synonym where it has one.
DEEDS = [
    *(("called", "phoned"), ("helped", "assisted"), ("thanked",), ("warned", "alerted"), ("greeted", "welcomed")),
    *(("invited",), ("praised", "commended"), ("visited",), ("scolded", "reprimanded"), ("interviewed",)),
    *(("hugged", "embraced"), ("photographed",), ("hired", "employed"), ("rescued", "saved"), ("teased",)),
    *(("contacted", "reached"), ("followed", "trailed"), ("paid",), ("comforted", "consoled"), ("mentioned",)),
]
# Past tense and participle, first of the verb, then of its synonym.
TRANSFERS = [
    *((("gave", "given"), ("handed", "handed")), (("sent", "sent"), ("mailed", "mailed")), (("sold", "sold"),)),
    *((("lent", "lent"), ("loaned", "loaned")), (("showed", "shown"),), (("offered", "offered"),)),
]
THINGS = (
    "map key camera letter ticket book guitar umbrella lamp recipe photo watch parcel notebook basket flute contract "
    "postcard painting drum"
).split()
PURCHASES = [
    *((("bought", "bought"), ("purchased", "purchased")), (("packed", "packed"),), (("sold", "sold"),)),
    *((("chose", "chosen"), ("selected", "selected")), (("found", "found"),), (("ordered", "ordered"),)),
]
GOODS = "scarf hat coat lamp bag cup bowl chair blanket vase jacket box table shirt mirror carpet".split()
MODIFIERS = [
    *("red", "blue", "green", "yellow", "black", "white", "brown", "pink"),
    *("small", "large", "new", "cheap", "plain", "striped", "heavy", "round"),
]
FRUITS = "apples pears plums lemons melons peaches cherries onions carrots radishes figs tomatoes".split()
DISHES = "soup salad fish rice cake cheese bread pasta steak stew pie omelette".split()
# Past tense and base form.
MEALS = [
    *((("ordered", "order"),), (("liked", "like"), ("enjoyed", "enjoy")), (("tried", "try"), ("tasted", "taste"))),
    *((("served", "serve"),), (("cooked", "cook"), ("prepared", "prepare")), (("finished", "finish"),)),
]
ACTIONS = [
    *(("passed the exam", "pass the exam"), ("joined the choir", "join the choir"), ("missed the bus", "miss the bus")),
    *(("paid the bill", "pay the bill"), ("liked the film", "like the film"), ("signed the letter", "sign the letter")),
    *(("won a prize", "win a prize"), ("took the train", "take the train"), ("slept well", "sleep well")),
    *(("read the report", "read the report"), ("heard the alarm", "hear the alarm"), ("brought a gift", "bring a gift")),
    *(("locked the door", "lock the door"), ("stayed for dinner", "stay for dinner"), ("left early", "leave early")),
    *(("voted for the plan", "vote for the plan"), ("saw the fox", "see the fox"), ("ran the race", "run the race")),
]
PLACES = "library museum bakery bank pool market gallery office pharmacy theater garden shop".split()

T = TypeVar("T")


class Pair(NamedTuple):
    """One row, and what is not written: the kind of its scene and the words that fill it."""

    sentence1: str
    sentence2: str
    label: str
    kind: str
    scene: tuple[str, ...]


class Scene(NamedTuple):
    """The words that fill a scene, and its teller: `tell(a, b, synonym)` gives all forms with a and b in their places."""

    words: tuple[str, ...]
    a: str
    b: str
    tell: Callable[[str, str, int], list[str]]


class Words:
    """Draws from the lists above; in training every fourth entry of a list is left out (`unseen` lets all in).

    Only `Random.random` is used: its stream is the same in all versions of Python, that of `choice` and `shuffle` is not
    promised to be.
    """

    def __init__(self, rng: random.Random, unseen: bool) -> None:
        self.rng = rng
        self.unseen = unseen

    def index(self, length: int) -> int:
        return int(self.rng.random() * length)

    def any(self, entries: Sequence[T]) -> T:
        """One entry out of all, also in training: for short closed lists such as days and numbers."""
        return entries[self.index(len(entries))]

    def one(self, entries: Sequence[T]) -> T:
        return self.any(entries if self.unseen else [entry for i, entry in enumerate(entries) if i % 4 != 3])

    def two(self, draw: Callable[[Sequence[str]], str], entries: Sequence[str]) -> tuple[str, str]:
        """Two different entries."""
        first = second = draw(entries)
        while second == first:
            second = draw(entries)
        return first, second


def people_scene(words: Words) -> Scene:
    """Who did it to whom."""
    a, b = words.two(words.one, PEOPLE)
    deed, time = words.one(DEEDS), words.one(TIMES)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        did = deed[synonym % len(deed)]
        return [
            f"{a} {did} {b} {time}",
            f"{time}, {a} {did} {b}",
            f"{b} was {did} by {a} {time}",
            f"{time}, {b} was {did} by {a}",
            f"it was {a} who {did} {b} {time}",
        ]

    return Scene((a, b, deed[0], time), a, b, tell)


def transfer_scene(words: Words) -> Scene:
    """Who gave, and who received."""
    a, b = words.two(words.one, PEOPLE)
    transfer, thing, time = words.one(TRANSFERS), words.one(THINGS), words.one(TIMES)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        gave, given = transfer[synonym % len(transfer)]
        return [
            f"{a} {gave} {b} the {thing} {time}",
            f"{a} {gave} the {thing} to {b} {time}",
            f"{time}, {a} {gave} {b} the {thing}",
            f"{time}, {a} {gave} the {thing} to {b}",
            f"the {thing} was {given} to {b} by {a} {time}",
        ]

    return Scene((a, b, transfer[0][0], thing, time), a, b, tell)


def modifier_scene(words: Words) -> Scene:
    """Which adjective belongs to which noun."""
    person, purchase, time = words.one(PEOPLE), words.one(PURCHASES), words.one(TIMES)
    a, b = words.two(words.one, MODIFIERS)
    first, second = words.two(words.one, GOODS)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        bought, done = purchase[synonym % len(purchase)]
        return [
            f"{person} {bought} a {a} {first} and a {b} {second} {time}",
            f"{person} {bought} a {b} {second} and a {a} {first} {time}",
            f"{time}, {person} {bought} a {a} {first} and a {b} {second}",
            f"{time}, {person} {bought} a {b} {second} and a {a} {first}",
            f"a {a} {first} and a {b} {second} were {done} by {person} {time}",
        ]

    return Scene((person, purchase[0][0], time, a, b, first, second), a, b, tell)


def subject_negation_scene(words: Words) -> Scene:
    """Who did it, and who did not."""
    a, b = words.two(words.one, PEOPLE)
    (did, do), day = words.one(ACTIONS), words.any(DAYS)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        return [
            f"{a} {did} on {day}, but {b} did not",
            f"on {day}, {a} {did}, but {b} did not",
            f"{b} did not {do} on {day}, but {a} did",
            f"unlike {b}, {a} {did} on {day}",
            f"it was {a}, not {b}, who {did} on {day}",
        ]

    return Scene((a, b, did, day), a, b, tell)


def object_negation_scene(words: Words) -> Scene:
    """What it was, and what it was not."""
    person, meal = words.one(PEOPLE), words.one(MEALS)
    a, b = words.two(words.one, DISHES)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        did, do = meal[synonym % len(meal)]
        return [
            f"{person} {did} the {a} but not the {b}",
            f"{person} did not {do} the {b} but did {do} the {a}",
            f"it was the {a}, not the {b}, that {person} {did}",
            f"the {a}, but not the {b}, was {did} by {person}",
        ]

    return Scene((person, meal[0][0], a, b), a, b, tell)


def count_scene(words: Words) -> Scene:
    """How many of which."""
    person, purchase, time = words.one(PEOPLE), words.one(PURCHASES), words.one(TIMES)
    a, b = words.two(words.any, NUMBERS)
    first, second = words.two(words.one, FRUITS)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        bought, done = purchase[synonym % len(purchase)]
        return [
            f"{person} {bought} {a} {first} and {b} {second} {time}",
            f"{person} {bought} {b} {second} and {a} {first} {time}",
            f"{time}, {person} {bought} {a} {first} and {b} {second}",
            f"{time}, {person} {bought} {b} {second} and {a} {first}",
            f"{a} {first} and {b} {second} were {done} by {person} {time}",
        ]

    return Scene((person, purchase[0][0], time, a, b, first, second), a, b, tell)


def hour_scene(words: Words) -> Scene:
    """When on which day."""
    place, opens = words.one(PLACES), words.any(["opens", "closes"])
    a, b = words.two(words.any, HOURS)
    first, second = words.two(words.any, DAYS)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        return [
            f"the {place} {opens} at {a} on {first} and at {b} on {second}",
            f"the {place} {opens} at {b} on {second} and at {a} on {first}",
            f"on {first} the {place} {opens} at {a}, and on {second} at {b}",
            f"on {second} the {place} {opens} at {b}, and on {first} at {a}",
        ]

    return Scene((place, opens, a, b, first, second), a, b, tell)


def price_scene(words: Words) -> Scene:
    """What costs how much."""
    a, b = words.two(words.any, PRICES)
    first, second = words.two(words.one, GOODS)

    def tell(a: str, b: str, synonym: int) -> list[str]:
        return [
            f"the {first} costs {a} euros and the {second} costs {b}",
            f"the {second} costs {b} euros and the {first} costs {a}",
            f"the price is {a} euros for the {first} and {b} for the {second}",
            f"the price is {b} euros for the {second} and {a} for the {first}",
        ]

    return Scene((a, b, first, second), a, b, tell)


# Kind of near-miss: the scenes that it is drawn from, each as often as the others.
KINDS = {
    "agent and patient": [people_scene, transfer_scene],
    "modifiers": [modifier_scene],
    "negation": [subject_negation_scene, object_negation_scene],
    "numbers": [count_scene, hour_scene, price_scene],
}


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def draw_pair(words: Words) -> Pair:
    kind = words.any(list(KINDS))
    scene = words.any(KINDS[kind])(words)
    label = "paraphrase" if words.rng.random() < PARAPHRASE_SHARE else "different"
    told = scene.tell(scene.a, scene.b, words.index(2))
    a, b = (scene.a, scene.b) if label == "paraphrase" else (scene.b, scene.a)
    retold = scene.tell(a, b, words.index(2))
    first = words.index(len(told))
    second = (first + 1 + words.index(len(told) - 1)) % len(told)  # always another form
    return Pair(sentence(told[first]), sentence(retold[second]), label, kind, tuple(sorted(scene.words)))


def make_pairs(seed: int) -> dict[str, list[Pair]]:
    """All splits, a function of the seed alone; the words of a scene, in whatever order, are used once."""
    rng = random.Random(seed)
    used = set()
    splits: dict[str, list[Pair]] = {}
    for split, size in SPLIT_SIZES.items():
        words = Words(rng, unseen=split != "train")
        pairs = splits[split] = []
        while len(pairs) < size:
            pair = draw_pair(words)
            if pair.scene not in used:
                used.add(pair.scene)
                pairs.append(pair)
    return splits


def write_pairs(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in make_pairs(seed).items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
            for idx, pair in enumerate(pairs):
                row = {"sentence1": pair.sentence1, "sentence2": pair.sentence2, "label": pair.label, "idx": idx}
                file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's synthetic sentence pairs as JSON lines.")
    parser.add_argument("output_dir", type=Path, help="folder for train.jsonl, validation.jsonl and test.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_pairs(arguments.output_dir, arguments.seed)
    sizes = ", ".join(f"{size:,} {split}" for split, size in SPLIT_SIZES.items())
    print(f"{arguments.output_dir}: synthetic sentence pairs, {sizes}")


if __name__ == "__main__":
    sys.exit(main())
