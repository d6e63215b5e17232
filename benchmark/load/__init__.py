"""What `serving` sends and when, beyond random prompts at random times: files, conversations, prefixes, traces.

`arrivals.py` draws times, `traces.py` and `datasets.py` read files, `sources.py` makes requests of them, `arguments.py`
declares the options, `records.py` writes what became of each request, and `lag.py` watches the client itself.
"""
