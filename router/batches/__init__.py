"""OpenAI's `/v1/files` and `/v1/batches`: jobs that the server keeps and answers itself, beside its other requests."""
