"""The image towers that wrappers have in common, each with its classes and the names of its modules."""
