"""Stubs that `make proto` generates from `proto/generate.proto`. Nobody changes them by hand."""
