"""Constrained generation: compiling grammars (`compiler.py`), and the tokens that they allow next (`follower.py`).

A grammar as plain data: `router/scheduling/grammar.py`. Grammars that clients ask for, by whatever name:
`router/requests/grammars.py`. Those that hold an answer to calls of tools: `router/chat/grammars.py`.
"""
