"""The commands of `lockstep-bench`, a module each, with `add_arguments` and `run`."""
