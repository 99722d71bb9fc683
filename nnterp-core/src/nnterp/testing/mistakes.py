"""What a mistake is answered with: an error in words that help, at the line that made it."""

import linecache
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def mistake(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The block raises ``kind``, with a match of each of ``words`` in its message, from its line marked ``# here``."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    for word in words:
        assert re.search(word, message), f"{message!r} says nothing of {word!r}"
    frames = traceback.extract_tb(caught.value.__traceback__)
    raised = [linecache.getline(frame.filename, frame.lineno or 0).strip() for frame in frames]
    assert any("# here" in line for line in raised), f"raised at {raised}"
