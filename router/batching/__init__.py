"""The loop of continuous batching: it has steps planned, sends them to the shards and delivers what they answer."""
