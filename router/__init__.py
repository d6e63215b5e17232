"""The router: from HTTP requests to one ordered stream of steps, and from tokens back to text. It never imports torch.

`__main__.py` is the process, `apis/app.py` the application. A request passes through `apis`, `requests`, `scheduling`,
`batching` and `shards`, and its tokens come back through `batching`, `text` and `apis`. Work that a client's text can
make expensive runs elsewhere: threads (`sandbox/workers.py`) or processes (`sandbox`, `grammars`).
"""
