"""The forward order of the values, measured."""


def of(model, layer):
    raise NotImplementedError


def rank(model, name, layer):
    raise NotImplementedError
