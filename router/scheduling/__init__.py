"""Which requests run in the next step, on which KV blocks: plain data and plans, without a process.

A waiting request is admitted when its whole sequence fits into the free tokens and blocks, which are reserved at once,
or when what it is expected to write does (`forecast.py`), and gets blocks as it grows. Between API keys `fairness.py`
decides whose request is next and who makes room. Prompts are computed in chunks beside decoding sequences
(`chunks.py`). `lockstep-bench simulate` runs this room in virtual time, and Ray Serve dispatches with `balancing.py`,
so nothing here has a clock, a socket or a tensor.
"""
