"""The words of the embedded model's small world: names, animals, places, things and food.

They are kept apart from the story plots because both the plots and the chat requests pick from
them. Nothing here knows about grammar beyond pronouns; `stories` puts the words into sentences.
"""

from __future__ import annotations

from dataclasses import dataclass

GIRL_NAMES: tuple[str, ...] = tuple("Lily Mia Anna Ella Nora Rosa Clara Emma Lucy Zoe Ivy Ruby Maya Sofia".split())
BOY_NAMES: tuple[str, ...] = tuple("Tom Ben Max Sam Leo Jack Finn Oscar Noah Hugo Adam Theo Peter Omar".split())
RARE_GIRL_NAMES: tuple[str, ...] = tuple(
    "Sara Julia Nina Alice Mary Kate Grace Hana Priya Aisha Jane Yuki Amy Lena".split()
)
RARE_BOY_NAMES: tuple[str, ...] = tuple(
    "Bob John Paul David Simon Henry George Charlie James Alex Ravi Kenji Ali Nico".split()
)
SHE_ANIMAL_NAMES: tuple[str, ...] = tuple(
    "Hazel Daisy Poppy Bella Coco Clover Willow Olive Fern Molly Penny Luna".split()
)
HE_ANIMAL_NAMES: tuple[str, ...] = tuple("Rusty Pip Bruno Biscuit Milo Otto Basil Toby Gus Rocky Monty Barney".split())


@dataclass(frozen=True)
class Species:
    """A kind of hero: what it is called, where it lives and which adjectives suit it."""

    noun: str
    land: str
    adjectives: tuple[str, ...]


_SMALL = ("little", "small", "young")
_BIG = ("young", "big", "gentle")


def _animals(land: str, adjectives: tuple[str, ...], nouns: str) -> tuple[Species, ...]:
    return tuple(Species(noun, land, adjectives) for noun in nouns.split())


ANIMALS: tuple[Species, ...] = (
    *_animals("wild", _SMALL, "fox rabbit mouse hedgehog squirrel owl frog turtle beaver mole"),
    *_animals("wild", _SMALL, "otter sparrow snail fox rabbit mouse bee cricket"),
    *_animals("wild", _BIG, "bear deer badger wolf bear"),
    *_animals("farm", _SMALL, "cat dog kitten puppy lamb duck pig chick goose"),
    *_animals("farm", _BIG, "pony goat donkey cow horse"),
    *_animals("plain", _BIG, "lion elephant giraffe zebra tiger"),
    *_animals("plain", _SMALL, "monkey parrot lizard"),
    *_animals("snow", _SMALL, "penguin seal"),
    *_animals("wild", ("little", "young", "friendly"), "dragon unicorn robot"),
)
CHILDREN: tuple[tuple[str, str], ...] = (
    ("girl", "she"),
    ("boy", "he"),
    ("girl", "she"),
    ("boy", "he"),
    ("girl", "she"),
    ("boy", "he"),
    ("girl", "she"),
    ("boy", "he"),
    ("princess", "she"),
    ("prince", "he"),
    ("shepherd", "he"),
    ("knight", "he"),
    ("wizard", "he"),
    ("baker", "she"),
    ("gardener", "she"),
)
TRAITS: tuple[str, ...] = tuple(
    "kind brave curious shy clever cheerful gentle quiet friendly happy funny careful".split()
)

HOMES: dict[str, tuple[str, ...]] = {
    "town": (
        "in a small village",
        "in a small village by the sea",
        "in a little town near the hills",
        "in a tall house at the end of the street",
        "in a quiet village between two rivers",
        "in a white house with a green door",
        "in a small house near the forest",
        "on a farm outside the village",
        "in a house by the lake",
        "in an old town with narrow streets",
    ),
    "castle": (
        "in a castle on a hill",
        "in an old castle with a tall tower",
        "in a faraway kingdom",
        "in a kingdom by the sea",
    ),
    "wild": (
        "in a big forest",
        "in a green forest",
        "under an old oak tree",
        "in a cozy home under the hill",
        "at the edge of the forest",
        "near a clear stream",
        "in a quiet valley",
        "deep in the forest",
    ),
    "farm": (
        "on a small farm",
        "on a farm near the village",
        "in a warm barn",
        "on a sunny farm with a red barn",
        "in a green meadow next to a farm",
    ),
    "plain": ("near a wide river", "in a warm and sunny land", "on a wide grassy plain", "at the edge of the jungle"),
    "snow": ("in a land of ice and snow", "on a snowy shore", "near the cold blue sea", "on a small island of ice"),
}


@dataclass(frozen=True)
class Place:
    """A place with the phrase for being there and the phrase for going there."""

    name: str
    at: str
    to: str


def _places(*rows: str) -> tuple[Place, ...]:
    places = []
    for row in rows:
        name, at, to = row.split("|")
        places.append(Place(f"the {name}", f"{at} the {name}", f"{to} the {name}"))
    return tuple(places)


_OUTDOORS = _places(
    "river|by|to",
    "meadow|in|to",
    "hill|on|up",
    "pond|near|to",
    "old oak tree|under|to",
    "old bridge|near|to",
    "tall grass|in|into",
    "big rock|behind|to",
    "stream|by|to",
    "apple tree|under|to",
)
PLACES: dict[str, tuple[Place, ...]] = {
    "town": _OUTDOORS
    + _places(
        "park|in|to",
        "garden|in|into",
        "market|at|to",
        "school|near|to",
        "beach|on|to",
        "woods|in|into",
        "library|in|to",
    ),
    "castle": _OUTDOORS + _places("garden|in|into", "tower|in|up", "stable|in|to", "kitchen|in|to", "woods|in|into"),
    "wild": _OUTDOORS + _places("woods|in|into", "blackberry bush|behind|to", "valley|in|into"),
    "farm": _OUTDOORS + _places("barn|in|into", "garden|in|into", "haystack|behind|to", "fence|near|to"),
    "plain": _places(
        "river|by|to",
        "tall grass|in|into",
        "big rock|behind|to",
        "waterhole|near|to",
        "palm tree|under|to",
        "hill|on|up",
    ),
    "snow": _places("ice cave|in|into", "sea|by|to", "snowy hill|on|up", "big rock|behind|to", "frozen lake|on|to"),
}

_CLOTH = "red blue green yellow striped soft warm new woolen"
_HARD = "red blue green yellow wooden small shiny new old"
_METAL = "golden silver little shiny small old tiny"
THINGS: tuple[str, ...] = tuple(
    f"{adjective} {noun}"
    for adjectives, nouns in (
        (_CLOTH, "hat scarf blanket coat"),
        (_HARD, "boat drum box basket cup whistle flute toy"),
        (_METAL, "bell key coin lantern button ring"),
        ("red blue green yellow new big little", "ball kite umbrella"),
        ("red blue old new little favorite", "book"),
    )
    for adjective in adjectives.split()
    for noun in nouns.split()
)
SPOTS: tuple[str, ...] = (
    "under a bush",
    "behind a big stone",
    "inside an old basket",
    "between the roots of a tree",
    "on a low branch",
    "under a pile of leaves",
    "next to a fallen log",
    "in the shade of a wall",
)
SNOW_SPOTS: tuple[str, ...] = (
    "behind a big stone",
    "under the snow",
    "between two blocks of ice",
    "in a small hole in the ice",
)
FOODS: tuple[str, ...] = (
    "basket of berries",
    "loaf of warm bread",
    "piece of cake",
    "jar of honey",
    "bag of nuts",
    "bowl of soup",
    "big cookie",
    "slice of apple pie",
    "bowl of rice",
    "bag of sweet plums",
    "red apple",
    "juicy pear",
    "sweet melon",
    "box of cherries",
)
