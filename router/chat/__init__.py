"""From messages to a prompt: a model's chat template, found and rendered."""
