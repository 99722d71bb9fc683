"""The recurrences of transformers' mixers written out (`nnterp.testing.recurrent_oracles.Recurrence`)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnterp.testing.recurrent_oracles import BETAS, DECAYS, KEYS, QUERIES, VALUES, Kernel, Recurrence, Values


class DeltaRule(Recurrence):
    """Gated DeltaNet; with decays per key channel, KDA.

    Attributes:
        NORMED: Whether the kernel brings queries and keys to unit length.
    """

    COMPONENT = "LinearAttention"
    PROMPT, STEP = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    ARGUMENTS = {QUERIES: "query", KEYS: "key", VALUES: "value", DECAYS: "g", BETAS: "beta"}
    UNAVAILABLE = {"state": "route_kernels", "states": "route_kernels"}
    REFUSES_IN_PLACE = (VALUES,)
    NORMED = True

    def entering(self, kernel: Kernel) -> Values:
        values = {name: kernel.arguments[argument] for name, argument in self.ARGUMENTS.items()}
        heads = values[VALUES].shape[2]
        for name in (QUERIES, KEYS):
            if values[name].shape[2] != heads:  # a copy is laid out in memory, and rounds, otherwise
                values[name] = values[name].repeat_interleave(heads // values[name].shape[2], dim=2)
        return values

    def put(self, kernel: Kernel, values: Values, changed: set[str]) -> None:
        kernel.arguments.update({self.ARGUMENTS[name]: value for name, value in values.items()})

    def initial(self, kernel: Kernel) -> Tensor | None:
        state = kernel.arguments.get("initial_state")
        return None if state is None else state.clone()

    def called(self, kernel: Kernel, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return kernel(initial_state=initial)

    def returned(self, kernel: Kernel, outputs: Tensor, final: Tensor | None) -> Any:
        return outputs, final if kernel.arguments["output_final_state"] else None

    def prepared(self, values: Values) -> Values:
        queries, keys = values[QUERIES], values[KEYS]
        if self.NORMED:
            queries, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
        return {**values, QUERIES: queries / queries.shape[-1] ** 0.5, KEYS: keys}

    def zeros(self, values: Values) -> Tensor:
        keys, value = values[KEYS], values[VALUES]
        return keys.new_zeros(keys.shape[0], *keys.shape[2:], value.shape[-1])

    def next_state(self, state: Tensor, now: Values) -> Tensor:
        decays, key = now[DECAYS], now[KEYS].unsqueeze(-1)
        state = state * decays.exp().reshape(*decays.shape, *[1] * (state.dim() - decays.dim()))
        held = (state * key).sum(-2)
        return state + key * (now[BETAS].unsqueeze(-1) * (now[VALUES] - held)).unsqueeze(-2)

    def read(self, state: Tensor, now: Values, extras: Values) -> Tensor:
        return (state * now[QUERIES].unsqueeze(-1)).sum(-2)


def softplus_of(steps: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The step sizes as the kernels make them of ``dt`` and ``dt_bias``."""
    steps = steps if bias is None else steps + bias.to(steps.dtype)
    return F.softplus(steps) if softplus else steps


class Stepping(Recurrence):
    """State-space models: the decode kernel overwrites the cache's state, and ``D`` times the value skips the scan."""

    INITIAL: str | None = None
    RETURN_FINAL = ""

    def served(self, state: Tensor) -> Tensor:
        """A state of the kernel's, key side first; its own inverse."""
        return state

    def initial(self, kernel: Kernel) -> Tensor | None:
        state = kernel.arguments.get("state" if kernel.step else self.INITIAL)
        return None if state is None else self.served(state).clone()

    def scanned(self, kernel: Kernel, **started: Any) -> tuple[Tensor, Tensor | None]:
        """``(outputs, final state)`` as the kernel lays them out."""
        if kernel.step:
            return kernel(**started), kernel.arguments["state"].clone()
        result = kernel(**started)
        return result if isinstance(result, tuple) else (result, None)

    def returned(self, kernel: Kernel, outputs: Tensor, final: Tensor | None) -> Any:
        if kernel.step:
            with torch.no_grad():
                kernel.arguments["state"].copy_(self.served(final))
            return outputs
        return (outputs, self.served(final)) if kernel.arguments.get(self.RETURN_FINAL) else outputs

    def start(self, kernel: Kernel, initial: Tensor | None) -> dict[str, Tensor]:
        """Start a decode step from ``initial``; the argument that does so for a prompt."""
        if kernel.step:
            kernel.arguments["state"].copy_(self.served(initial))
            return {}
        return {} if initial is None else {self.INITIAL: self.served(initial)}

    def parameters(self, mixer: nn.Module) -> Values:
        return {"D": mixer.D.detach().double()}


class Scan(Stepping):
    """Mamba-1: one state per channel, outputs gated inside the kernel."""

    COMPONENT = "SelectiveScan"
    PROMPT, STEP = "mamba_selective_scan", "mamba_selective_state_update"
    RETURN_FINAL = "return_last_state"
    READ_ONLY = (BETAS, DECAYS)
    FROM_A_STATE = CONTINUES = False
    FRESH = "starts from zeros"
    REFUSES_IN_PLACE = (QUERIES, KEYS)

    def tokens_first(self, kernel: Kernel, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(1) if kernel.step else tensor.transpose(1, 2)

    def channels_first(self, kernel: Kernel, tensor: Tensor) -> Tensor:
        return tensor.squeeze(1) if kernel.step else tensor.transpose(1, 2)

    def entering(self, kernel: Kernel) -> Values:
        given = kernel.arguments
        queries, keys, values, steps = (
            self.tokens_first(kernel, given[name]) for name in ("C", "B", "hidden_states", "dt")
        )
        kind = "dt" if kernel.step else "delta"
        betas = softplus_of(steps, given.get(f"{kind}_bias"), given.get(f"{kind}_softplus", False))
        return {
            QUERIES: queries.unsqueeze(2),
            KEYS: keys.unsqueeze(2),
            VALUES: values,
            DECAYS: betas.float().unsqueeze(-1) * given["A"],
            BETAS: betas,
        }

    def put(self, kernel: Kernel, values: Values, changed: set[str]) -> None:
        kernel.arguments.update(
            C=self.channels_first(kernel, values[QUERIES].squeeze(2)),
            B=self.channels_first(kernel, values[KEYS].squeeze(2)),
            hidden_states=self.channels_first(kernel, values[VALUES]),
        )

    def called(self, kernel: Kernel, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        outputs, final = self.scanned(kernel, z=None, **self.start(kernel, initial))
        return self.tokens_first(kernel, outputs), final

    def returned(self, kernel: Kernel, outputs: Tensor, final: Tensor | None) -> Any:
        outputs = self.channels_first(kernel, outputs)
        gate = kernel.arguments.get("z")
        return super().returned(kernel, outputs if gate is None else outputs * F.silu(gate), final)

    def extras(self, kernel: Kernel) -> Values:
        return {"D": kernel.arguments["D"].double()}

    def zeros(self, values: Values) -> Tensor:
        decays = values[DECAYS]
        return decays.new_zeros(decays.shape[0], *decays.shape[2:])

    def next_state(self, state: Tensor, now: Values) -> Tensor:
        return state * now[DECAYS].exp() + (now[BETAS] * now[VALUES]).unsqueeze(-1) * now[KEYS]

    def read(self, state: Tensor, now: Values, extras: Values) -> Tensor:
        return (state * now[QUERIES]).sum(-1) + extras.get("D", 0) * now[VALUES]


class ScalarDecay(Stepping):
    """Mamba-2: a scalar decay per head, queries and keys shared by the heads of a group."""

    COMPONENT = "StateSpace"
    PROMPT, STEP = "mamba2_chunk_scan", "mamba2_selective_state_update"
    INITIAL, RETURN_FINAL = "initial_states", "return_final_states"
    UNAVAILABLE = {"state": "in one step", "states": "chunk_per_token"}
    STATES_WRITABLE = False
    BESIDE = (DECAYS,)

    def served(self, state: Tensor) -> Tensor:
        return state.transpose(-1, -2)

    cached = served

    def rates(self, kernel: Kernel) -> Tensor:
        rates = kernel.arguments["A"].float()
        return rates[:, 0, 0] if kernel.step else rates

    def entering(self, kernel: Kernel) -> Values:
        given = kernel.arguments
        queries, keys, values, steps = (given[name] for name in ("C", "B", "hidden_states", "dt"))
        bias = given.get("dt_bias")
        if kernel.step:
            queries, keys, values = (tensor.unsqueeze(1) for tensor in (queries, keys, values))
            steps, bias = steps[..., :1].transpose(1, 2), None if bias is None else bias[:, 0]
        betas = softplus_of(steps, bias, given.get("dt_softplus", False))
        if not kernel.step:
            betas = betas.clamp(*given.get("dt_limit", (0.0, float("inf"))))
        decays = self.rates(kernel) * betas.float()
        return {QUERIES: queries, KEYS: keys, VALUES: values, DECAYS: decays, BETAS: betas}

    def implied(self, kernel: Kernel, name: str, value: Tensor) -> Values:
        return {DECAYS: self.rates(kernel) * value.float()} if name == BETAS else {}

    def put(self, kernel: Kernel, values: Values, changed: set[str]) -> None:
        betas = values[BETAS]
        if DECAYS in changed:
            was = self.entering(kernel)[DECAYS]
            moved = (values[DECAYS] != was) | values[DECAYS].requires_grad
            betas = torch.where(moved, (values[DECAYS] / self.rates(kernel)).to(betas.dtype), betas)
        tokens = {"C": values[QUERIES], "B": values[KEYS], "hidden_states": values[VALUES]}
        if kernel.step:
            tokens = {name: tensor.squeeze(1) for name, tensor in tokens.items()}
            betas = betas.transpose(1, 2).expand(-1, -1, values[VALUES].shape[-1])
        else:
            kernel.arguments["dt_limit"] = (float("-inf"), float("inf"))
        kernel.arguments.update(tokens, dt=betas, dt_bias=None, dt_softplus=False)

    def called(self, kernel: Kernel, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        outputs, final = self.scanned(kernel, **self.start(kernel, initial))
        outputs = outputs.unsqueeze(1) if kernel.step else outputs
        return outputs, None if final is None else self.served(final)

    def returned(self, kernel: Kernel, outputs: Tensor, final: Tensor | None) -> Any:
        return super().returned(kernel, outputs.squeeze(1) if kernel.step else outputs, final)

    def extras(self, kernel: Kernel) -> Values:
        weights = kernel.arguments["D"].double()
        return {"D": weights[:, 0] if kernel.step else weights}

    def prepared(self, values: Values) -> Values:
        heads = values[VALUES].shape[2]
        shared = {n: values[n].repeat_interleave(heads // values[n].shape[2], dim=2) for n in (QUERIES, KEYS)}
        return {**values, **shared}

    def zeros(self, values: Values) -> Tensor:
        keys, value = values[KEYS], values[VALUES]
        return keys.new_zeros(keys.shape[0], *keys.shape[2:], value.shape[-1])

    def next_state(self, state: Tensor, now: Values) -> Tensor:
        written = now[KEYS].unsqueeze(-1) * (now[BETAS].unsqueeze(-1) * now[VALUES]).unsqueeze(-2)
        return state * now[DECAYS].exp()[..., None, None] + written

    def read(self, state: Tensor, now: Values, extras: Values) -> Tensor:
        skip = extras["D"].unsqueeze(-1) * now[VALUES] if "D" in extras else 0
        return (state * now[QUERIES].unsqueeze(-1)).sum(-2) + skip
