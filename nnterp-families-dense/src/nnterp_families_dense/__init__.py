"""The dense families: every module of this package is one, named by its `model_type`."""
