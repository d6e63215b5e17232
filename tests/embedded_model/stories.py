"""A grammar of short stories for young readers, the main training text of the embedded model.

A story is an introduction followed by the beats of one plot: a wish or a trouble, an attempt,
some help, a result and a feeling. Each beat has several wordings with choices inside, and names,
pronouns, places and things stay the same from the first sentence to the last. The module knows
nothing about chat or tokens; `corpus` turns stories into documents.

The plots are texts in `plots.json`: where a plot can happen, what it is about, and its beats in order. Every beat is
a list of wordings of the same event, so any choice leads to a story that holds together. `{h}` is the hero, `{f}` the
friend and `{o}` the helper; `[one|other]` is a choice. A capital first letter in a slot asks for a capital.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.embedded_model import words

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{([A-Za-z_0-9.]+)\}")
_PRONOUNS: dict[str, dict[str, str]] = {
    "he": {"he": "he", "him": "him", "his": "his", "self": "himself"},
    "she": {"he": "she", "him": "her", "his": "her", "self": "herself"},
}
_UNNAMED_SHARE = 0.25
_RARE_NAME_SHARE = 0.1
_OPPOSITE_SHARE = 0.85


@dataclass(frozen=True)
class Plot:
    """One plot. `direct`: wordings of the first beat for stories that open in the middle of the action, where the
    introduction has already said where the hero is. `extra`: slots of this plot alone."""

    name: str
    lands: Sequence[str]
    topics: Sequence[str]
    direct: Sequence[str]
    beats: Sequence[Sequence[str]]
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)


PLOTS = tuple(Plot(**plot) for plot in json.loads(Path(__file__).with_name("plots.json").read_text()))


@dataclass(frozen=True)
class Person:
    """A character: how it is introduced, called and replaced by a pronoun."""

    reference: str
    intro: str
    call: str
    gender: str
    noun: str
    land: str

    def slots(self, key: str) -> dict[str, str]:
        """The template slots of this character under a one-letter key."""
        slots = {f"{key}.{name}": word for name, word in _PRONOUNS[self.gender].items()}
        slots[key] = self.reference
        slots[f"{key}.intro"] = self.intro
        slots[f"{key}.call"] = self.call
        slots[f"{key}.noun"] = self.noun
        return slots


@dataclass(frozen=True)
class Story:
    """A finished story and a request that it answers, such as "a story about a fox"."""

    text: str
    request: str


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun phrase."""
    sounds_like_vowel = noun[0] in "aeiou" and not noun.startswith("uni")
    return f"an {noun}" if sounds_like_vowel else f"a {noun}"


def capitalise(text: str) -> str:
    """Make the first letter a capital and leave the others as they are."""
    return text[:1].upper() + text[1:]


def expand(rng: random.Random, template: str, slots: dict[str, str]) -> str:
    """Resolve the [one|other] choices of a template, innermost first, and fill its {slots}."""
    match = _CHOICE.search(template)
    while match:
        choice = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
        match = _CHOICE.search(template)

    def fill(found: re.Match[str]) -> str:
        key = found.group(1)
        if key[0].isupper():
            return capitalise(slots[key[0].lower() + key[1:]])
        return slots[key]

    return _SLOT.sub(fill, template)


def _child_name(rng: random.Random, gender: str, taken: Sequence[str]) -> str:
    common, rare = (
        (words.GIRL_NAMES, words.RARE_GIRL_NAMES) if gender == "she" else (words.BOY_NAMES, words.RARE_BOY_NAMES)
    )
    pool = rare if rng.random() < _RARE_NAME_SHARE else common
    return rng.choice([name for name in pool if name not in taken])


def _animal_name(rng: random.Random, gender: str, taken: Sequence[str]) -> str:
    if rng.random() < _RARE_NAME_SHARE:
        return _child_name(rng, gender, taken)
    pool = words.SHE_ANIMAL_NAMES if gender == "she" else words.HE_ANIMAL_NAMES
    return rng.choice([name for name in pool if name not in taken])


def make_child(rng: random.Random, gender: str | None = None, taken: Sequence[str] = ()) -> Person:
    """A human hero or friend."""
    roles = [role for role in words.CHILDREN if gender in (None, role[1])]
    noun, own_gender = rng.choice(roles)
    name = _child_name(rng, own_gender, taken)
    kind = f"{rng.choice(('little', 'young', rng.choice(words.TRAITS)))} {noun}"
    if noun in ("girl", "boy") and rng.random() < 0.3:
        kind = noun
    land = "castle" if noun in ("princess", "prince", "knight", "wizard") else "town"
    intro = f"{with_article(kind)} {rng.choice(('named', 'named', 'called'))} {name}"
    return Person(name, intro, name, own_gender, noun, land)


def make_animal(
    rng: random.Random,
    lands: Sequence[str],
    gender: str | None = None,
    taken: Sequence[str] = (),
    nouns: Sequence[str] | None = None,
    named: bool | None = None,
) -> Person:
    """An animal hero or friend from one of the lands, named or known by its kind only."""
    pool = [animal for animal in words.ANIMALS if animal.land in lands and animal.noun not in taken]
    if nouns:
        pool = [animal for animal in pool if animal.noun in nouns] or pool
    animal = rng.choice(pool)
    own_gender = gender or rng.choice(("he", "she"))
    adjective = rng.choice((*animal.adjectives, rng.choice(words.TRAITS)))
    kind = f"{adjective} {animal.noun}"
    if named is None:
        named = rng.random() >= _UNNAMED_SHARE
    if not named:
        return Person(
            f"the {animal.noun}", with_article(kind), f"little {animal.noun}", own_gender, animal.noun, animal.land
        )
    name = _animal_name(rng, own_gender, taken)
    intro = f"{with_article(kind)} {rng.choice(('named', 'named', 'called'))} {name}"
    return Person(name, intro, name, own_gender, animal.noun, animal.land)


def _friend(rng: random.Random, hero: Person) -> Person:
    other = "she" if hero.gender == "he" else "he"
    gender = other if rng.random() < _OPPOSITE_SHARE else hero.gender
    taken = (hero.reference, hero.noun)
    if hero.land in ("town", "castle"):
        if rng.random() < 0.75:
            while True:
                friend = make_child(rng, gender, taken)
                if friend.noun in ("girl", "boy") or rng.random() < 0.3:
                    return friend
        return make_animal(rng, ("wild", "farm"), gender, taken, named=True)
    lands = ("wild", "farm") if hero.land in ("wild", "farm") else (hero.land,)
    return make_animal(rng, lands, gender, taken, named=not hero.reference.startswith("the "))


def _helper(rng: random.Random, hero: Person, taken: str) -> Person:
    """A grown-up or a wise animal who knows what to do."""
    family = {"mother": "she", "father": "he", "grandmother": "she", "grandfather": "he"}
    roll = rng.random()
    if roll < 0.5:
        noun, gender = rng.choice(tuple(family.items()))
        reference = f"{_PRONOUNS[hero.gender]['his']} {noun}"
        return Person(reference, reference, noun, gender, noun, hero.land)
    if hero.land in ("town", "castle") and roll < 0.8:
        strangers = (("old woman", "she"), ("old man", "he"), ("kind farmer", "he"), ("friendly teacher", "she"))
        noun, gender = rng.choice(strangers)
    else:
        wise = {"snow": ("whale", "seal"), "plain": ("elephant", "turtle", "parrot")}
        pool = wise.get(hero.land, ("owl", "turtle", "crow", "toad", "badger"))
        animal = rng.choice([animal for animal in pool if animal not in (hero.noun, taken)])
        noun = f"{rng.choice(('wise old', 'old', 'wise'))} {animal}"
        gender = rng.choice(("he", "she"))
    short = noun.replace("wise old", "old").replace("friendly ", "").replace("kind ", "")
    return Person(f"the {short}", with_article(noun), noun, gender, noun, hero.land)


_LEADS = (
    "One day,",
    "One [sunny|bright|warm|windy|cool|quiet|fine|gray] [morning|afternoon|day],",
    "One [spring|summer|autumn] [morning|afternoon|day],",
    "One [Monday|Saturday|Sunday] [morning|afternoon],",
    "Early one morning,",
)
_SNOW_LEADS = ("One day,", "One [cold|bright|clear|windy|white] [morning|afternoon|day],", "Early one morning,")
_INTROS = (
    "Once upon a time, there was {h.intro}[ who|. {H.he}] lived {home}.",
    "Once upon a time, there was {h.intro}. {H.he} lived {home} with {h.his} {family}.",
    "Once upon a time, {h.intro} lived {home}.",
    "Once upon a time, {home}, there lived {h.intro}.",
    "Once upon a time {home}, there was {h.intro}.",
    "{Home}, there lived {h.intro}.",
    "{Home}, there was {h.intro}.",
    "{Home} lived {h.intro}.",
    "There was {h.intro} who lived {home}.",
    "There once was {h.intro}. {H.he} lived {home}.",
    "There was once {h.intro} who lived {home} with {h.his} {family}.",
    "Long ago, {h.intro} lived {home}.",
    "A long time ago, there lived {h.intro} {home}.",
    "{H.intro} lived {home}.",
    "This is the story of {h.intro}. {H.he} lived {home}.",
    "Far away, {home}, there lived {h.intro}.",
)
_NAMED_INTROS = (
    "{H} was {a_kind} who lived {home}.",
    "{H} was {a_kind}. {H.he} lived {home} with {h.his} {family}.",
    "{H} lived {home}. {H.he} was {a_kind}.",
)
_HABITS = (
    "",
    "",
    "",
    "{H.he} loved to {hobby}.",
    "Every day, {h.he} liked to {hobby}.",
    "{H.he} was {trait} and loved to {hobby}.",
    "Everyone liked {h} because {h.he} was always [kind|friendly|cheerful|funny|gentle].",
    "{H.he} was [kind|friendly|cheerful], and {h.he} had many friends.",
    "{H.he} liked to {hobby} and to {hobby2}.",
)
_HOBBIES = (
    "sing",
    "dance",
    "tell stories",
    "laugh",
    "look at the clouds",
    "play in the sun",
    "explore new places",
    "watch the stars",
    "jump and run",
    "listen to the birds",
    "ask questions",
    "help others",
)
_SNOW_HOBBIES = (
    "sing",
    "tell stories",
    "slide on the ice",
    "watch the stars",
    "play in the snow",
    "laugh",
    "ask questions",
    "help others",
)
_DIRECT_INTROS = (
    "{lead} {h.intro} went {p.to}.",
    "{lead} {h.intro} was playing {p.at}.",
    "{lead} {h.intro} was walking {p.to}.",
    "It was a [sunny|bright|lovely|quiet] [morning|day|afternoon]. {H.intro} was playing {p.at}.",
)


def _introduction(rng: random.Random, hero: Person, slots: dict[str, str], direct: bool) -> str:
    if direct:
        return expand(rng, rng.choice(_DIRECT_INTROS), slots)
    intros = list(_INTROS)
    if not hero.reference.startswith("the "):
        intros += list(_NAMED_INTROS)
    parts = [expand(rng, rng.choice(intros), slots), expand(rng, rng.choice(_HABITS), slots)]
    return " ".join(part for part in parts if part)


def _lead(rng: random.Random, land: str) -> str:
    return expand(rng, rng.choice(_SNOW_LEADS if land == "snow" else _LEADS), {})


def _story_slots(rng: random.Random, plot: Plot, hero: Person) -> dict[str, str]:
    friend = _friend(rng, hero)
    helper = _helper(rng, hero, friend.noun)
    slots = hero.slots("h") | friend.slots("f") | helper.slots("o")
    slots["f.first"] = f"{slots['h.his']} friend {friend.reference}"
    if friend.noun not in ("girl", "boy", *friend.reference.split()) and rng.random() < 0.5:
        slots["f.first"] += f" the {friend.noun}"
    for number, place in enumerate(rng.sample(words.PLACES[hero.land], 3), start=1):
        key = "p" if number == 1 else f"p{number}"
        slots |= {key: place.name, f"{key}.at": place.at, f"{key}.to": place.to}
    thing, food = rng.choice(words.THINGS), rng.choice(words.FOODS)
    hobbies = rng.sample(_SNOW_HOBBIES if hero.land == "snow" else _HOBBIES, 2)
    slots |= {
        "home": rng.choice(words.HOMES[hero.land]),
        "family": rng.choice(("mother", "father", "family", "parents", "grandmother")),
        "lead": _lead(rng, hero.land),
        "a_kind": _kind_of(hero),
        "trait": rng.choice(words.TRAITS),
        "hobby": hobbies[0],
        "hobby2": hobbies[1],
        "thing": thing,
        "a_thing": with_article(thing),
        "food": food,
        "a_food": with_article(food),
        "spot": rng.choice(words.SNOW_SPOTS if hero.land == "snow" else words.SPOTS),
    }
    for name, options in plot.extra.items():
        slots[name] = expand(rng, rng.choice(options), slots)
        slots[f"a_{name}"] = with_article(slots[name])
    return slots


def _kind_of(hero: Person) -> str:
    for joiner in (" named ", " called "):
        if joiner in hero.intro:
            return hero.intro.split(joiner)[0]
    return hero.intro


def _request(rng: random.Random, plot: Plot, hero: Person, slots: dict[str, str], text: str) -> str:
    """A subject that the story really has: its hero, its hero and friend, or its topic."""
    subjects = [_kind_of(hero), with_article(hero.noun), with_article(hero.noun)]
    if not hero.reference.startswith("the "):
        subjects += [hero.intro, f"{with_article(hero.noun)} named {hero.reference}"]
    subjects += [f"{with_article(hero.noun)} and {topic}" for topic in plot.topics[:1]]
    subjects += list(plot.topics)
    if f"{slots['f.noun']} " in text and slots["f.noun"] != hero.noun:
        subjects += [f"{with_article(hero.noun)} and {with_article(slots['f.noun'])}"] * 3
    return expand(rng, rng.choice(subjects), slots)


def make_story(rng: random.Random) -> Story:
    """One complete story with a request that fits it."""
    plot = rng.choice(PLOTS)
    animal = rng.random() < 0.55
    lands = [land for land in plot.lands if land not in ("town", "castle")]
    if animal and lands:
        weights = ("wild", "wild", "wild", "farm", "farm", "plain", "snow")
        hero = make_animal(rng, [rng.choice([land for land in weights if land in lands])])
    else:
        hero = make_child(rng)
    slots = _story_slots(rng, plot, hero)
    direct = rng.random() < 0.18
    beats = [expand(rng, rng.choice(beat), slots) for beat in plot.beats]
    if direct:
        beats = [expand(rng, rng.choice(plot.direct), slots), *beats[1:]]
    intro = _introduction(rng, hero, slots, direct)
    sentences = [part for part in (intro, *beats) if part]
    text = _layout(rng, sentences)
    return Story(text, _request(rng, plot, hero, slots, text))


def _layout(rng: random.Random, parts: list[str]) -> str:
    """Mostly one paragraph; now and then a break after the introduction and before the end."""
    if rng.random() < 0.85 or len(parts) < 4:
        return " ".join(parts)
    return "\n\n".join((parts[0], " ".join(parts[1:-1]), parts[-1]))
