"""The loop of continuous batching: it has steps planned, sends them to the shards and delivers what they answer.

The scheduler decides (`router/scheduling/`), the shards compute (`router/shards/`); here is the order of events
between them. `batcher.py` keeps two steps under way, queues again what the shards lost, and holds sequences whose
grammar has not been advanced. `prefix_mover.py` has blocks of the prefix cache moved beside the steps.
`batch_view.py` shows the batch to people.
"""
