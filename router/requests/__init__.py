"""A request from what any API asks for to its answer: checked, accounted for, generated."""
