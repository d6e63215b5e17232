"""Between conversations and text: a prompt from messages and tools, and text, tool calls and reasoning from an answer.

The model's chat template makes the prompt, in a process beside the router (`template.py`, `prompting.py`), of turns
that it takes (`turns.py`). A reader takes an answer apart as it comes (`reading.py`, `reader.py`); the formats are a
table (`formats.py`). Where a model has neither tools nor reasoning, no reader runs.
"""
