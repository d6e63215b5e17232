"""Which requests run in the next step, on which KV blocks: plain data and plans, without a process."""
