"""The scores and the pattern of every eager attention function of the installed transformers, checked by their numbers.

A tap that compiles proves nothing: it may hold the causal mask, the logits before their cap, or a pattern that nothing
uses. So every function is called with random queries, keys, values and mask, and what it serves has to be what the
documentation says: the scores are scaled, capped and masked, their softmax is the pattern, the pattern mixes the
values, and what is written to either is what the function goes on with.
"""

import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers.models
from nnsight.intervention.source import STATE, State
from torch import nn

from nnterp.components import interface

MODELS = Path(transformers.models.__path__[0])
DEFINITION = re.compile(r"^def (\w*eager_attention_forward)\(", re.MULTILINE)

#: Every function, as ``llama.eager_attention_forward``, with the module that defines it. Found without importing them.
FUNCTIONS = {
    f"{file.parent.name}.{name}": f"transformers.models.{file.parent.name}.{file.stem}"
    for file in sorted(MODELS.glob("*/modeling_*.py"))
    for name in DEFINITION.findall(file.read_text())
}

#: The functions whose scores and pattern cannot be served, which say so instead. None, on the supported releases.
REFUSED: set[str] = set()

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 5, 7, 4, 8
CAP, SCALING = 1.5, 0.3


# -- what each function computes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """What the values of a function satisfy. The defaults are the plain attention; `reason` says why one differs."""

    reason: str = ""
    scaling: float = SCALING
    masked: bool = True
    mask_required: bool = False
    sink: str | None = None  # where the sink's logit comes from: the "module", an "argument"
    rescaled: bool = False  # the sink scales the mixed values instead of taking a column of the softmax


SINK = Formula("a learned sink takes part of each row before it is dropped", sink="module")
SINK_ARGUMENT = Formula("as a sink of the module's, handed over by the call", sink="argument")
SINK_AFTERWARDS = Formula(
    "the sink scales what was mixed by sigmoid(logsumexp(scores) - sink), so rows of the pattern sum to one",
    sink="module",
    rescaled=True,
)
EXCEPTIONS = {
    "deepseek_v4.eager_attention_forward": SINK,
    "flint.eager_attention_forward": SINK,
    "gpt_oss.eager_attention_forward": SINK,
    "hy_v4.eager_attention_forward": SINK,
    "hy_v4_vl.eager_attention_forward": SINK,
    "mimo_v2_flash.eager_attention_forward": SINK,
    "openai_privacy_filter.eager_attention_forward": SINK,
    "inkling2.eager_attention_forward": SINK_ARGUMENT,
    "inkling2_loop.eager_attention_forward": SINK_ARGUMENT,
    "granite_swa.eager_attention_forward": SINK_AFTERWARDS,
    "granitemoe_swa.eager_attention_forward": SINK_AFTERWARDS,
    "llama4.vision_eager_attention_forward": Formula("ignores the scaling it is given", scaling=WIDTH**-0.5),
    "vjepa2.eager_attention_forward": Formula("ignores the mask it is given", masked=False),
    "modernbert_decoder.eager_attention_forward": Formula("adds the mask unasked", mask_required=True),
}


class Interleaver:
    """A run that writes down what it is served, and answers with what `edits` make of it."""

    interleaving = busy = True
    parked, observers = set(), {"block": ()}  # somebody has a use for everything

    def __init__(self, edits):
        self.edits, self.served, self.counts, self.fragments = edits, {}, {}, None

    def handle(self, location, value):
        name = location.removeprefix("block.")
        assert name not in self.served, f"{name} is served twice in one call"
        self.served[name] = value = self.edits.get(name, lambda value: value)(value)
        return value


class Case:
    """One function with its random arguments."""

    def __init__(self, name, dtype=torch.float32, masked=True, training=False):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.function = OWN.get(name) or defined(name)
        self.formula = EXCEPTIONS.get(name, Formula())
        parameters = inspect.signature(self.function).parameters
        self.groups = 2 if "repeat_kv" in self.function.__code__.co_names else 1
        self.query = random(BATCH, HEADS, QUERIES, WIDTH)
        self.key = random(BATCH, HEADS // self.groups, KEYS, WIDTH)
        self.value = random(BATCH, HEADS // self.groups, KEYS, WIDTH)
        hidden = torch.rand(BATCH, 1, QUERIES, KEYS, generator=generator) < 0.3
        self.mask = random(BATCH, 1, QUERIES, KEYS).masked_fill(hidden, torch.finfo(dtype).min) if masked else None
        self.sinks = random(HEADS)
        self.extra = {"dropout": 0.5 if training else 0.0}
        self.bias = random(1, HEADS, QUERIES, KEYS) if "position_bias" in parameters else None
        self.cap = CAP if "softcap" in parameters else None
        for parameter, given in (("position_bias", self.bias), ("softcap", self.cap)):
            if given is not None:
                self.extra[parameter] = given
        if self.formula.sink == "argument":
            self.extra["sinks"] = self.column()
        self.module = nn.Module().train(training)
        self.module.num_key_value_groups = self.groups
        self.module.head_dim = WIDTH
        self.module.sinks = nn.Parameter(self.sinks, requires_grad=False)

    def column(self):
        return self.sinks.reshape(1, -1, 1, 1).expand(BATCH, -1, QUERIES, 1)

    def run(self, function=None, **edits):
        """What the function returns and what it serves, in a run that edits what it is served."""
        interleaver = Interleaver(edits)
        state = State(None)
        state.register(interleaver, "block")
        self.module.__dict__[STATE] = state
        torch.manual_seed(0)
        function = function or interface.serving_call(self.function)
        arguments = (self.module, self.query, self.key, self.value, self.mask)
        output, weights = function(*arguments, scaling=SCALING, **self.extra)
        return output, weights, interleaver.served

    # -- by hand ------------------------------------------------------------------------------------------------------

    def scores(self):
        scores = self.query.float() @ self.repeated(self.key).float().transpose(2, 3) * self.formula.scaling
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        if self.bias is not None:
            scores = scores + self.bias.float()
        return scores + self.mask.float() if self.mask is not None and self.formula.masked else scores

    def probabilities(self, scores):
        """The pattern that ``scores`` give."""
        scores = scores.float()
        if self.formula.sink is None or self.formula.rescaled:
            return scores.softmax(-1)
        return torch.cat([scores, self.column().float()], -1).softmax(-1)[..., :-1]

    def mixed(self, probabilities, scores):
        """The head outputs that ``probabilities`` give."""
        mixed = probabilities.float() @ self.repeated(self.value).float()
        if self.formula.rescaled:
            sink = self.sinks.float().reshape(1, -1, 1)
            mixed = mixed * torch.sigmoid(scores.float().logsumexp(-1) - sink)[..., None]
        return mixed.transpose(1, 2)

    def repeated(self, tensor):
        return tensor.repeat_interleave(self.groups, 1)


def close(actual, expected, dtype=torch.float32):
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def defined(name):
    """The function ``name`` of `FUNCTIONS`."""
    return getattr(importlib.import_module(FUNCTIONS[name]), name.rpartition(".")[2])


# -- functions written in other ways ----------------------------------------------------------------------------------


def masked_elsewhere(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Its masked scores are another variable than its products: the one that enters the softmax is served."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    masked = scores if attention_mask is None else scores + attention_mask
    probabilities = nn.functional.softmax(masked, dim=-1)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


def changed_after_masking(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Changes its scores once more after the mask: they are served as they enter the softmax."""
    scores = torch.matmul(query, key.transpose(2, 3)) * -scaling
    if attention_mask is not None:
        scores = scores - attention_mask
    scores = -scores
    probabilities = nn.functional.softmax(scores.float(), dim=-1).to(query.dtype)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


OWN = {function.__name__: function for function in (masked_elsewhere, changed_after_masking)}

served = pytest.mark.parametrize("name", [*OWN, *sorted(FUNCTIONS.keys() - REFUSED)])


# -- every function ---------------------------------------------------------------------------------------------------


def test_the_functions_are_found():
    """Enough of them, and no exception is left behind by a release that renamed its function."""
    assert len(FUNCTIONS) > 300
    assert FUNCTIONS.keys() >= REFUSED
    newer = {"flint", "hy_v4_vl", "inkling2", "inkling2_loop"}  # not in every supported release
    assert {name for name in EXCEPTIONS.keys() - FUNCTIONS.keys() if name.partition(".")[0] not in newer} == set()


def test_exactly_these_are_refused():
    """The rest of this file is about the others, so a function that is refused must not leave it in silence."""
    assert {name for name in FUNCTIONS if isinstance(interface.eager_copy(defined(name)), str)} == REFUSED


@served
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_served_is_what_is_computed(name, dtype):
    """The scores are the formula's, their softmax the pattern, the pattern mixes the values, in this order."""
    case = Case(name, dtype)
    output, weights, values = case.run()
    assert list(values) == [
        interface.INPUTS,
        interface.SCORES,
        interface.PROBABILITIES,
        interface.HEAD_OUTPUTS,
    ]
    scores, probabilities = values[interface.SCORES], values[interface.PROBABILITIES]
    close(scores, case.scores(), dtype)
    close(probabilities, case.probabilities(scores), dtype)
    close(output, case.mixed(probabilities, scores), dtype)
    assert probabilities.dtype == dtype
    assert torch.equal(weights, probabilities), "what the function returns as its pattern is what it serves"
    assert all(a is b for a, b in zip(values[interface.INPUTS], (case.query, case.key, case.value), strict=True))
    assert values[interface.HEAD_OUTPUTS] is output


@served
def test_serving_changes_nothing(name):
    """Bit for bit what the function itself returns, with a mask, without one, and with dropout."""
    for options in ({}, {"masked": False}, {"training": True}):
        case = Case(name, **options)
        if case.formula.mask_required and case.mask is None:
            continue
        output, weights, values = case.run()
        plain_output, plain_weights, _ = case.run(case.function)
        assert torch.equal(output, plain_output)
        assert torch.equal(weights, plain_weights)
        close(values[interface.SCORES], case.scores())
        close(output, case.mixed(values[interface.PROBABILITIES], values[interface.SCORES]))


@served
def test_what_is_written_is_what_is_used(name):
    """Scores written give the pattern, a pattern written is returned and mixed with, inputs written are scored."""
    case = Case(name)
    new = torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1))
    for write in (lambda value: value.copy_(new), lambda value: new):
        output, _, values = case.run(**{interface.SCORES: write})
        close(values[interface.PROBABILITIES], case.probabilities(new))
        close(output, case.mixed(values[interface.PROBABILITIES], new))
        output, weights, values = case.run(**{interface.PROBABILITIES: write})
        assert torch.equal(weights, new)
        close(output, case.mixed(new, values[interface.SCORES]))
    output, _, _ = case.run(**{interface.HEAD_OUTPUTS: torch.zeros_like})
    assert not output.any()
    output, _, values = case.run(**{interface.INPUTS: lambda inputs: tuple(2 * each for each in inputs)})
    case.query, case.key, case.value = values[interface.INPUTS]
    close(values[interface.SCORES], case.scores())
    close(output, case.mixed(values[interface.PROBABILITIES], values[interface.SCORES]))


# -- functions the rule does not fit ----------------------------------------------------------------------------------


def softmaxed_at_once(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Keeps its scores in no variable."""
    return torch.matmul(nn.functional.softmax(torch.matmul(query, key.transpose(2, 3)) * scaling, dim=-1), value), None


def masked_in_the_softmax(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Masks in the call of the softmax, so no variable holds masked scores."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    probabilities = nn.functional.softmax(scores + attention_mask, dim=-1)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


def masked_by_condition(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Computes the mask after its scores: the last statement that mentions it is not the one that masks."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is None:
        attention_mask = torch.zeros_like(scores)
    scores = scores + attention_mask
    attention_mask = attention_mask.bool()
    probabilities = nn.functional.softmax(scores, dim=-1)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


def in_operators(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Multiplies with the operator."""
    probabilities = nn.functional.softmax(query @ key.transpose(2, 3) * scaling + attention_mask, dim=-1)
    return (probabilities @ value).transpose(1, 2), probabilities


def mixed_as_an_expression(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Mixes with an expression, so no variable holds the pattern."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = nn.functional.softmax(scores, dim=-1)
    return torch.matmul(probabilities * 2, value).transpose(1, 2), probabilities


UNFIT = [
    softmaxed_at_once,
    masked_in_the_softmax,
    masked_by_condition,
    in_operators,
    mixed_as_an_expression,
    transformers.AttentionInterface()["sdpa"],
    torch.nn.functional.scaled_dot_product_attention,
]


@pytest.mark.parametrize("function", UNFIT, ids=lambda function: function.__name__)
def test_an_unfit_function_is_refused(function):
    """With the reason, and the call is made with the function itself: its output and inputs are served all the same."""
    reason = interface.eager_copy(function)
    assert isinstance(reason, str)
    assert function.__name__ in reason
