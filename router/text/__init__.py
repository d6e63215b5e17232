"""Between token ids and text."""
