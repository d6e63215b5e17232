"""Speculative models: what proposes tokens on the shards, where `router/drafting` guesses from texts.

Each is a `Proposer` (`server/stepping/proposals.py`): a `DraftModel` is a smaller model of any served family,
`Medusa` and a `HeadProposer` go on from hidden states of the served one. The router decides how many proposals are made
and which of them are checked.
"""
