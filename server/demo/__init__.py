"""The embedded demo model: its weights, the program that made them and the text behind it.

The server serves this folder when no model is named, so that a first start shows generation at
once. The package holds no server code.
"""
