"""What the arguments and results of a recurrence's kernels mean: one object per kind of recurrence.

Every mechanism gives the same names to what it computes from, tokens first: ``queries`` that read the state, ``keys``
and ``values`` that are written into it, ``decays`` (the log of how much of it each token keeps), ``betas`` (how
strongly each token writes), and ``state_input``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from nnterp.components.recurrence import effective
from nnterp.components.recurrence.sources import compiled


class Mechanism:
    """How one kind of recurrence passes its kernels what they need. A `KernelCall` holds the arguments by name."""

    #: The arguments that have one entry per token, in axis 1, by the value they are.
    TOKENS: dict[str, str] = {}
    #: The argument that is the state a prompt starts from, and the one that asks for the state it ends with.
    INITIAL = "initial_state"
    RETURN_FINAL = "output_final_state"

    def length(self, arguments: dict[str, Any]) -> int:
        """Tokens of a call of the prompt's kernel."""
        return arguments[self.TOKENS["values"]].shape[1]

    def loops(self, call: Any) -> bool:
        """Whether transformers' own kernel, which is a loop over tokens in some calls, is one in this call."""
        return True

    def read(self, call: Any) -> dict[str, Any]:
        """The values by name, each a view of an argument wherever it is one."""
        raise NotImplementedError

    def write(self, call: Any, changed: dict[str, Any], served: dict[str, Any]) -> None:
        """Put the values that were ``changed`` into the call's arguments."""
        for name, value in changed.items():
            call.arguments[self.INITIAL if name == "state_input" else self.TOKENS[name]] = value

    def settle(self, call: Any, served: dict[str, Any], rows: Callable[[Tensor], Tensor] = lambda whole: whole) -> None:
        """Make values of ``served`` that are one quantity agree, where one of them was edited."""

    def differentiate(self, call: Any, unchanged: dict[str, Any], served: dict[str, Any]) -> None:
        """Have the kernel compute from the very tensors that were served, so that each has a gradient; to the same
        bits. ``unchanged`` are those that `write` has not put there.
        """
        graded = (n for n, v in unchanged.items() if isinstance(v, Tensor) and v.requires_grad and n != "state_input")
        self.write(call, {name: served[name] for name in graded}, served)

    def initial(self, call: Any) -> Tensor | None:
        """The state the call starts from, as the kernel takes it."""
        return call.arguments.get(self.INITIAL)

    def piece(self, call: Any, start: int, stop: int, state: Tensor | None) -> dict[str, Any]:
        """The arguments for the tokens from ``start`` to ``stop``, starting from ``state``."""
        cut = {name: call.arguments[name][:, start:stop] for name in self.TOKENS.values()}
        return {**call.arguments, **cut, self.INITIAL: state, self.RETURN_FINAL: True}

    def unpack(self, call: Any, result: Any, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """``(outputs, final state)`` of what the kernel returned; ``final`` where it was asked for a state besides."""
        return result if isinstance(result, tuple) else (result, None)

    def pack(self, call: Any, outputs: Tensor, final: Tensor | None) -> Any:
        """What the mixer's forward expects of the kernel."""
        return outputs, final if call.arguments[self.RETURN_FINAL] else None

    def gate(self, call: Any) -> Tensor | None:
        """What the kernel was to gate its outputs with, taken out of its arguments, or None."""
        return call.arguments.pop("z", None) if call.arguments.get("z") is not None else None

    def served_state(self, state: Tensor) -> Tensor:
        """A state of the kernel's, key side first; `unserved_state` is its inverse."""
        return state

    def unserved_state(self, state: Tensor) -> Tensor:
        return state

    def served_outputs(self, call: Any, outputs: Tensor) -> Tensor:
        """The kernel's outputs, tokens first; `unserved_outputs` is its inverse."""
        return outputs

    def unserved_outputs(self, call: Any, outputs: Tensor) -> Tensor:
        return outputs

    def keep(self, call: Any, final: Tensor, left: Tensor, changed: bool) -> Tensor:
        """The state handed on to the cache: ``final``, or ``left``, what the trace left of it where it ``changed``.

        A tensor that no trace holds: the cache overwrites it in the next step.
        """
        return self.unserved_state(left).clone() if changed else final.clone()

    def effective_attention(self, call: Any, values: dict[str, Any]) -> Tensor:
        """``[batch, heads, query, key]``: the weight of each token's value in each later token's output."""
        raise NotImplementedError


class DeltaRule(Mechanism):
    """The gated delta rule, and its variant with a decay per key channel (KDA): one argument per value."""

    TOKENS = {"queries": "query", "keys": "key", "values": "value", "decays": "g", "betas": "beta"}

    def read(self, call: Any) -> dict[str, Any]:
        arguments = call.arguments
        heads = arguments["value"].shape[2]
        for name in ("query", "key"):  # transformers 5.24.0 repeats them in its kernel, 5.19.0 before it
            shared = arguments[name]
            if shared.shape[2] != heads:
                arguments[name] = shared.repeat_interleave(heads // shared.shape[2], dim=2)
        initial = arguments.get("initial_state")
        return {
            **{name: arguments[argument] for name, argument in self.TOKENS.items()},
            "state_input": None if initial is None else initial.clone(),
        }

    def effective_attention(self, call: Any, values: dict[str, Any]) -> Tensor:
        normed = bool(call.arguments.get("use_qk_l2norm_in_kernel"))
        return effective.delta_rule(*(values[name] for name in self.TOKENS if name != "values"), normed)


class InPlaceUpdate(Mechanism):
    """A mechanism whose decode step has a kernel of its own, which overwrites the cache's state and returns outputs."""

    INITIAL = "initial_states"

    def unpack(self, call: Any, result: Any, final: bool = False) -> tuple[Tensor, Tensor | None]:
        return (result, call.arguments["state"]) if call.step else super().unpack(call, result, final)

    def pack(self, call: Any, outputs: Tensor, final: Tensor | None) -> Any:
        return (outputs, final) if not call.step and call.arguments.get(self.RETURN_FINAL) else outputs

    def keep(self, call: Any, final: Tensor, left: Tensor, changed: bool) -> Tensor:
        if not call.step:
            return super().keep(call, final, left, changed)
        if changed:
            final.copy_(self.unserved_state(left))
        return final

    def start_from(self, call: Any, state: Tensor) -> None:
        """Have the call start from ``state``, laid out as the kernel takes it."""
        if call.step:
            call.arguments["state"].copy_(state)
        else:
            call.arguments[self.INITIAL] = state


def softplus_of(step: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The step size of a selective scan as its kernels compute it from ``dt`` and ``dt_bias``."""
    step = step if bias is None else step + bias.to(step.dtype)
    return F.softplus(step) if softplus else step


class SelectiveScan(InPlaceUpdate):
    """Mamba-1: channels before tokens, a decay per channel and state dimension, outputs gated inside the kernel."""

    RETURN_FINAL = "return_last_state"
    TOKENS = {"queries": "C", "keys": "B", "values": "hidden_states", "steps": "dt"}

    def length(self, arguments: dict[str, Any]) -> int:
        return arguments["hidden_states"].shape[-1]

    def loops(self, call: Any) -> bool:
        from transformers.utils.import_utils import is_mambapy_available

        return not (call.arguments.get("use_mambapy") and is_mambapy_available())

    def tokens_first(self, call: Any, argument: Tensor) -> Tensor:
        return argument.unsqueeze(1) if call.step else argument.transpose(1, 2)

    def channels_first(self, call: Any, value: Tensor) -> Tensor:
        return value.squeeze(1) if call.step else value.transpose(1, 2)

    def read(self, call: Any) -> dict[str, Any]:
        arguments = call.arguments
        found = {name: self.tokens_first(call, arguments[argument]) for name, argument in self.TOKENS.items()}
        bias = arguments.get("dt_bias" if call.step else "delta_bias")
        softplus = arguments.get("dt_softplus" if call.step else "delta_softplus")
        return {
            "queries": found["queries"].unsqueeze(2),
            "keys": found["keys"].unsqueeze(2),
            "values": found["values"],
            "betas": softplus_of(found["steps"], bias, softplus),
            "state_input": arguments["state"].clone() if call.step else None,
        }

    def write(self, call: Any, changed: dict[str, Any], served: dict[str, Any]) -> None:
        for name, value in changed.items():
            if name == "state_input":
                self.start_from(call, value)
            elif name in ("queries", "keys"):
                call.arguments[self.TOKENS[name]] = self.channels_first(call, value.squeeze(2))
            elif name == "values":
                call.arguments["hidden_states"] = self.channels_first(call, value)

    def served_outputs(self, call: Any, outputs: Tensor) -> Tensor:
        return self.tokens_first(call, outputs)

    def unserved_outputs(self, call: Any, outputs: Tensor) -> Tensor:
        return self.channels_first(call, outputs)

    def decays(self, call: Any, betas: Tensor) -> Tensor:
        """``[batch, seq, channels, state_dim]``, float32."""
        return betas.float()[..., None] * call.arguments["A"].float()

    def effective_attention(self, call: Any, values: dict[str, Any]) -> Tensor:
        betas = values["betas"].float()
        return effective.selective_scan(
            values["queries"][:, :, 0], values["keys"][:, :, 0], self.decays(call, betas), betas
        )


class StateSpace(InPlaceUpdate):
    """Mamba-2: a scalar decay per head, groups of heads that share keys and queries, the state value side first."""

    RETURN_FINAL = "return_final_states"
    TOKENS = {"queries": "C", "keys": "B", "values": "hidden_states", "steps": "dt"}

    def rates(self, call: Any) -> Tensor:
        """``A``, the rate each head's state decays at, ``[heads]``, float32 and negative."""
        rates = call.arguments["A"].float()
        return rates[:, 0, 0] if call.step else rates

    def read(self, call: Any) -> dict[str, Any]:
        arguments = call.arguments
        tokens = {name: arguments[argument] for name, argument in self.TOKENS.items()}
        bias = arguments.get("dt_bias")
        if call.step:  # no axis of tokens, and one step size per head laid out over the head's width
            tokens = {name: value.unsqueeze(1) for name, value in tokens.items()}
            tokens["steps"], bias = tokens["steps"][..., 0], None if bias is None else bias[:, 0]
        betas = softplus_of(tokens.pop("steps"), bias, arguments.get("dt_softplus"))
        if not call.step:
            low, high = arguments.get("dt_limit", (0.0, float("inf")))
            betas = betas.clamp(low, high)
        initial = arguments["state"] if call.step else arguments.get("initial_states")
        return {
            **tokens,
            "betas": betas,
            "decays": self.rates(call) * betas.float(),
            "state_input": None if initial is None else self.served_state(initial).clone(),
        }

    def write(self, call: Any, changed: dict[str, Any], served: dict[str, Any]) -> None:
        call.assigned = call.assigned or bool({"betas", "decays"} & changed.keys())
        self.settle(call, served)
        for name, value in changed.items():
            if name == "state_input":
                self.start_from(call, self.unserved_state(value))
            elif name in self.TOKENS:
                call.arguments[self.TOKENS[name]] = value.squeeze(1) if call.step else value
        if call.edited:
            self._step_sizes(call, served["betas"])

    def settle(self, call: Any, served: dict[str, Any], rows: Callable[[Tensor], Tensor] = lambda whole: whole) -> None:
        """Make ``betas`` and ``decays``, one quantity, agree in ``served``: whichever was edited, the other follows.

        Where an entry of either is another than the last time, in ``rows`` of the call. Raises ValueError where both
        are, and not to the same.
        """
        betas, decays, rates = served["betas"], served["decays"], self.rates(call)
        untouched = not (call.assigned or betas._version or decays._version)
        if untouched or isinstance(betas, FakeTensor):
            return
        if call.settled is None:
            call.settled = self.read(call)
        were = {name: rows(call.settled[name]) for name in ("betas", "decays")}
        by_betas, by_decays = betas != were["betas"], decays != were["decays"]
        if not (by_betas.any() or by_decays.any()):
            return
        call.edited = True
        implied = rates * betas.float()
        if (by_betas & by_decays & ~implied.isclose(decays, rtol=1e-2 if betas.dtype.itemsize < 4 else 1e-5)).any():
            raise ValueError(
                f"betas and decays of {call.path} are one quantity, dt and A * dt, and both were edited, to different "
                f"ones: edit one of them"
            )
        if by_betas.any():
            decays.copy_(torch.where(by_betas, implied, decays))
        if by_decays.any():
            betas.copy_(torch.where(by_decays & ~by_betas, (decays / rates).to(betas.dtype), betas))
        with torch.no_grad():
            were["betas"].copy_(betas)
            were["decays"].copy_(decays)

    def differentiate(self, call: Any, unchanged: dict[str, Any], served: dict[str, Any]) -> None:
        steps = {"betas", "decays"}
        super().differentiate(call, {n: v for n, v in unchanged.items() if n not in steps}, served)
        if served["decays"].requires_grad and compiled(call.kernel) is None:
            implied = served["decays"] / self.rates(call)  # the kernel's betas to the bit, with the gradient of both
            self._step_sizes(call, served["betas"].detach() + (implied - implied.detach()).to(served["betas"].dtype))

    def _step_sizes(self, call: Any, betas: Tensor) -> None:
        """Have the kernel use ``betas`` as they are: past the bias, the softplus and the limits."""
        width = call.arguments["hidden_states"].shape[-1]
        dt = betas.squeeze(1).unsqueeze(-1).expand(-1, -1, width) if call.step else betas
        call.arguments.update(dt=dt, dt_bias=None, dt_softplus=False)
        if not call.step:
            call.arguments["dt_limit"] = (-float("inf"), float("inf"))

    def served_state(self, state: Tensor) -> Tensor:
        return state.transpose(-1, -2)

    unserved_state = served_state

    def served_outputs(self, call: Any, outputs: Tensor) -> Tensor:
        return outputs.unsqueeze(1) if call.step else outputs

    def unserved_outputs(self, call: Any, outputs: Tensor) -> Tensor:
        return (outputs.squeeze(1) if call.step else outputs).contiguous()  # the mixers take views of it

    def effective_attention(self, call: Any, values: dict[str, Any]) -> Tensor:
        return effective.state_space(values["queries"], values["keys"], values["decays"], values["betas"])


ANEW = "the recurrence starts anew at position 0, so nothing of the state it is given is kept: edit decays before it"


class GatedRecurrence(Mechanism):
    """RG-LRU: one number per channel, which a gate keeps a part of and a value is added to; no kernel for a step."""

    TOKENS = {"values": "hidden_states"}
    INITIAL = "recurrent_states"

    def decays(self, call: Any) -> Tensor:
        gate, reset = call.arguments["recurrent_gate"], call.arguments["reset"]
        return gate.float().log().masked_fill(reset, float("-inf"))

    def read(self, call: Any) -> dict[str, Any]:
        initial, decays = self.initial(call), self.decays(call)
        call.keeps = initial is not None  # without a cache the module is given none, and the next call drops its own
        anew = torch.isneginf(decays[:, 0])
        without_data = isinstance(anew, FakeTensor)
        if initial is not None:
            initial = None if not without_data and anew.all() else initial.masked_fill(anew, 0)
        return {"values": call.arguments["hidden_states"], "decays": decays, "state_input": initial}

    def write(self, call: Any, changed: dict[str, Any], served: dict[str, Any]) -> None:
        arguments = call.arguments
        if "values" in changed:
            arguments["hidden_states"] = changed["values"]
        if "decays" in changed:
            before, initial = self.decays(call), self.initial(call)
            self.keep_by(call, changed["decays"], torch.eq(changed["decays"], before))
            if initial is not None:  # what the module keeps of another prompt
                arguments[self.INITIAL] = initial.masked_fill(torch.isneginf(before[:, 0]), 0)
        if "state_input" in changed:
            state = changed["state_input"]
            if state.masked_select(torch.isneginf(served["decays"][:, 0])).any():
                raise ValueError(f"state_input of {call.path} was edited, and {ANEW}")
            arguments[self.INITIAL] = state

    def keep_by(self, call: Any, decays: Tensor, same: Tensor) -> None:
        """Have the kernel keep ``exp(decays)`` of the state; its own gate to the bit where they are the ``same``."""
        gate, reset = call.arguments["recurrent_gate"], call.arguments["reset"]
        kept = decays.exp()  # float32, which the kernel accumulates in: an edit is not rounded to the gate's dtype
        own = gate.masked_fill(reset, 0).detach().float() + (kept - kept.detach())
        call.arguments.update(recurrent_gate=torch.where(same, own, kept), reset=torch.zeros_like(reset))

    def differentiate(self, call: Any, unchanged: dict[str, Any], served: dict[str, Any]) -> None:
        if "decays" in unchanged and served["decays"].requires_grad:
            self.keep_by(call, served["decays"], torch.ones_like(served["decays"], dtype=torch.bool))

    def unpack(self, call: Any, result: Any, final: bool = False) -> tuple[Tensor, Tensor | None]:
        outputs, state = result
        return outputs, state if call.keeps else None

    def pack(self, call: Any, outputs: Tensor, final: Tensor | None) -> Any:
        return outputs, final

    def effective_attention(self, call: Any, values: dict[str, Any]) -> Tensor:
        return effective.kept(values["decays"].transpose(1, 2))


#: By the name that a family's tap uses.
MECHANISMS: dict[str, Mechanism] = {
    "gated_recurrence": GatedRecurrence(),
    "delta_rule": DeltaRule(),
    "selective_scan": SelectiveScan(),
    "state_space": StateSpace(),
}
