"""What other servers' users type: TGI's command line, which is taken whole, and what the options of others are here.

Data, of which `docs/moving.md` is the page: a test compares them. Nothing here starts or reads anything.
"""
