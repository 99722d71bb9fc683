"""vLLM's implementation of each family: every module of this package is one, named by its `model_type`."""
