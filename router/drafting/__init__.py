"""Guesses of what a text goes on with, and how many of them pay.

The model chooses a token behind each guess in one step, as it would have one by one: nothing changes but the time that
an answer takes (Leviathan et al. 2022, arXiv 2211.17192). A `Drafter` guesses from what was said before,
in the same text (prompt lookup, Saxena 2023) or in earlier answers to the same key (REST, arXiv 2311.08252;
SuffixDecoding, arXiv 2411.04975). `Speculation` says how many guesses each sequence of a step gets, by how often they
were right and what steps take, and keeps an account of each, so that no text pays for guesses that fail.

Plain arithmetic in the router's loop: without clock, wire, requests or blocks.
"""
