"""A race: Lockstep and other programs that run language models, each by its own command line, in turn."""
