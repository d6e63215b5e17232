"""All the text the embedded model is trained on, made here from a seed and from nothing else.

A document is a story, a question with its answer, or a chat written with the model's own chat
template. The same seed always gives the same documents; another seed gives held-out text. No
outside text is used, so there is nothing to license and nothing private to leak.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.embedded_model import words
from tests.embedded_model.answers import Exchange, make_exchange
from tests.embedded_model.stories import make_story, with_article

END = "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant.') }}"
    "{% endif %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] | trim }}</s>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
KINDS: tuple[str, ...] = ("story", "answer", "chat")

_ASKS: tuple[str, ...] = (
    "Tell me a story about {subject}.",
    "Tell me a story about {subject}",
    "Tell me a story about {subject}.",
    "Tell me a short story about {subject}.",
    "Write a story about {subject}.",
    "Write a short story about {subject}.",
    "Can you tell me a story about {subject}?",
    "Please tell me a story about {subject}.",
    "I would like a story about {subject}.",
    "tell me a story about {subject}",
)
_ANY_ASKS: tuple[str, ...] = (
    "Tell me a story.",
    "Tell me a story",
    "Tell me a short story.",
    "Tell me another story.",
    "Can you tell me a story?",
    "Write a story.",
    "Write a short story.",
    "I want to hear a story.",
    "Yes, please.",
    "Yes",
    "Another one, please.",
    "Once upon a time",
)
_SYSTEM_TEXTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are the demo model of Lockstep.",
    "You tell stories to children.",
    "You are a friendly assistant. Answer in short sentences.",
    "Be kind and clear.",
)


@dataclass(frozen=True)
class Document:
    """One training text without its end mark, and the kind of text it is."""

    text: str
    kind: str


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Write a chat exactly as `CHAT_TEMPLATE` writes it, without a template engine."""
    turns = [f"<|{message['role']}|>\n{message['content'].strip()}{END}\n" for message in messages]
    return "".join(turns) + "<|assistant|>\n" * add_generation_prompt


def story_exchange(rng: random.Random) -> Exchange:
    """A request for a story with a story that fits it."""
    story = make_story(rng)
    if rng.random() < 0.25:
        return Exchange(rng.choice(_ANY_ASKS), story.text)
    return Exchange(rng.choice(_ASKS).format(subject=story.request), story.text)


def _plain_answer(rng: random.Random) -> str:
    exchange = make_exchange(rng) if rng.random() < 0.8 else story_exchange(rng)
    form = rng.choice(
        (
            "Question: {question}\nAnswer: {answer}",
            "Question: {question}\nAnswer: {answer}",
            "Question: {question}\n\nAnswer: {answer}",
            "Q: {question}\nA: {answer}",
            "{question}\n{answer}",
            "{question}\n\n{answer}",
            "{question} {answer}",
        )
    )
    return form.format(question=exchange.question, answer=exchange.answer)


def _chat(rng: random.Random) -> str:
    messages: list[dict[str, str]] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM_TEXTS)})
    story_first = rng.random() < 0.4
    turns = rng.choice((1, 1, 1, 2)) if story_first else rng.choice((1, 1, 2, 3))
    for turn in range(turns):
        wants_story = story_first if turn == 0 else rng.random() < 0.2
        exchange = story_exchange(rng) if wants_story else make_exchange(rng)
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return render_chat(messages).removesuffix(f"{END}\n")


def _first_person(rng: random.Random) -> str:
    """A few sentences of someone who introduces himself or herself."""
    girl = rng.random() < 0.5
    girls, boys = words.GIRL_NAMES + words.RARE_GIRL_NAMES, words.BOY_NAMES + words.RARE_BOY_NAMES
    name, friend = rng.sample(girls if girl else boys, 2)
    greeting = rng.choice(("Hello, my", "My", "Hi, my", "Hello! My")) + " name is"
    pet = rng.choice(("cat", "dog", "rabbit", "pony", "turtle", "parrot"))
    adjective = rng.choice(("small", "big", "brown", "white", "black", "funny"))
    home = rng.choice(words.HOMES["town"])
    pronoun = "her" if girl else "his"
    return " ".join(
        (
            f"{greeting} {name}.",
            f"I am {rng.choice(('six', 'seven', 'eight', 'nine', 'ten'))} years old.",
            f"I live {home} with my {rng.choice(('family', 'mother', 'father', 'grandmother'))}.",
            f"I have {with_article(adjective)} {pet}.",
            f"My best friend is called {friend}.",
            rng.choice(
                (
                    f"I like to visit {friend} at {pronoun} house.",
                    f"Every day I play with {friend}.",
                    f"{friend} and I like to play in the garden.",
                )
            ),
        )
    )


def make_document(rng: random.Random) -> Document:
    """One document of a random kind."""
    roll = rng.random()
    if roll < 0.46:
        return Document(make_story(rng).text, "story")
    if roll < 0.48:
        return Document(_first_person(rng), "story")
    if roll < 0.72:
        return Document(_plain_answer(rng), "answer")
    return Document(_chat(rng), "chat")


def documents(seed: int) -> Iterator[Document]:
    """An endless stream of documents, the same one for the same seed."""
    rng = random.Random(seed)
    while True:
        yield make_document(rng)


def take(seed: int, count: int) -> list[Document]:
    """The first `count` documents of a seed."""
    stream = documents(seed)
    return [next(stream) for _ in range(count)]
