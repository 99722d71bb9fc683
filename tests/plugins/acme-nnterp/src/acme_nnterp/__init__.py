"""Acme's families for nnterp: every public module of this package is one. Nothing to import here."""
