"""What a suite states about its family, and the loaded models its tests run on."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from nnterp import components
from nnterp.testing import oracles
from nnterp.testing.checkpoint import Checkpoint
from nnterp.testing.oracles import Block, Formula, Inside, Site, Within, heads

#: The root's values that can be edited.
ROOT_VALUES = ("token_embeddings", "final_norm_output", "lm_head_output", "logits")
#: All values of the root.
ROOT_ROWS = ("input_ids", "attention_mask", "input_size", *ROOT_VALUES, "next_token_probs")


#: Where each value is in the plain pre-norm block.
SITES: dict[str, Site | Inside] = {
    "token_embeddings": Site("/embed_tokens"),
    "final_norm_output": Site("/norm"),
    "lm_head_output": Site("/lm_head"),
    "logits": Site("/"),
    "layer_input": Site("", "input"),
    "attention_norm_output": Site("input_layernorm"),
    "layer_mid": Site("post_attention_layernorm", "input"),
    "mlp_norm_output": Site("post_attention_layernorm"),
    "mlp_input": Site("mlp", "input"),
    "layer_output": Site(""),
    "self_attn.attention_queries": Inside("queries"),
    "self_attn.attention_keys": Inside("keys"),
    "self_attn.attention_values": Inside("values"),
    "self_attn.attention_scores": Inside("scores"),
    "self_attn.attention_probabilities": Inside("probabilities"),
    "self_attn.attention_head_outputs": Inside("head_outputs"),
    "self_attn.attention_premix": heads(Site("self_attn.o_proj", "input")),
    "self_attn.attention_output": Site("self_attn"),
    "mlp.mlp_activation": Site("mlp.act_fn"),
    "mlp.mlp_neurons": Site("mlp.down_proj", "input"),
    "mlp.mlp_output": Site("mlp"),
}


class Facts:
    """The facts a subclass states, each of which a layout can replace under its own name.

    Attributes:
        FAMILY: The ``model_type`` of the family, or its module.
        CONFIG: Fields of a tiny config, ``model_type`` among them. Three blocks, 32 wide, four heads of fewer
            key/value heads are a good size; the vocabulary is the kit's where the config does not say. A wrapper's
            has a ``text_config``; its tests run on text alone, and NATIVE says where the text model is.
        LAYOUTS: Variants of the config, by name. Each is ``{"config": fields, "load": keyword arguments of the
            load}`` and any fact of this class under its own name (``"EXPECTED_UNAVAILABLE": {...}``); every test
            runs on every layout.
        NATIVE: Native path of each standard path that differs (``"layers": "transformer.h"``,
            ``"layers.0.self_attn.o_proj": "transformer.h.0.attn.c_proj"``), None for a module that this family has
            not.
        EXPECTED_UNAVAILABLE: Part of the reason by support key (``"layer_mid": "parallel"``), for each value that no
            block has.
        SITES: Where a value is in the bare model, where the plain pre-norm block's place does not hold
            (`oracles.Site`).
        EDITED: The block that edits are tried on.
        REFUSES_IN_PLACE: Values that are views of one projection, which torch refuses to edit in place under autograd.
        ATTENTION_SINK: Rows of the pattern sum to less than one.
        ATTENTION_INPUT, MLP_INPUT: The value that attention and MLP are called with.
        SDPA: Whether transformers runs the family under ``attn_implementation="sdpa"``.
        UNDER_SDPA: What is unavailable then, where it is not EXPECTED_UNAVAILABLE and the scores and the pattern.
        ATTENTIONS, MLPS: The standard paths of a block's attentions and feed-forwards, where it has several
            (``"self_attn.0"``).
        PADDING_MATTERS: Whether what a row computes depends on its padding (windows of tokens that are compressed).
        OWN_SIZES: Sizes of axes, by value, that are not those of the model (keys repeated before they are served).
        MLP_WIDTH_KEY: The config key of the MLP's width, where `intermediate_size` is not in its parameters' shapes.
        FORMULA: The attention written out (`oracles.Formula`), None where the module does not call transformers'
            interface.
        BLOCK: The block written out (`oracles.Block`), where a value lies between its modules' calls (`Within`).
        CHECKPOINT: How the tiny checkpoint is built and loaded (`checkpoint.Checkpoint`, or a subclass of it).
    """

    FAMILY: ClassVar[Any]
    CONFIG: ClassVar[dict]
    LAYOUTS: ClassVar[dict[str, dict]] = {"default": {}}
    NATIVE: dict[str, str | None] = {}
    EXPECTED_UNAVAILABLE: dict[str, str] = {}
    SITES: dict[str, Site | Inside | Within] = {}
    EDITED: int = 1
    REFUSES_IN_PLACE: tuple[str, ...] = ()
    ATTENTION_SINK: bool = False
    ATTENTION_INPUT: str = "attention_norm_output"
    MLP_INPUT: str = "mlp_norm_output"
    SDPA: bool = True
    UNDER_SDPA: dict[str, str] | None = None
    ATTENTIONS: tuple[str, ...] = ("self_attn",)
    MLPS: tuple[str, ...] = ("mlp",)
    PADDING_MATTERS: bool = False
    OWN_SIZES: dict[str, dict[str, int]] = {}
    MLP_WIDTH_KEY: str | None = None
    FORMULA: Formula | None = Formula()
    BLOCK: Block | None = None
    CHECKPOINT: type[Checkpoint] = Checkpoint

    #: Set for each test from the layout it runs on.
    loaded: Checkpoint
    layout_name: str

    # -- parameters ---------------------------------------------------------------------------------------------------

    @classmethod
    def facts_of(cls, layout: str) -> dict[str, Any]:
        return {name: fact for name, fact in cls.LAYOUTS[layout].items() if name.isupper()}

    @classmethod
    def has(cls, layout: str, value: str) -> bool:
        """Whether the layout is expected to serve ``value``."""
        facts = cls.facts_of(layout)
        native = facts.get("NATIVE", cls.NATIVE)
        host = value.rpartition(".")[0]
        absent = bool(host) and native.get(f"layers.0.{host}", "") is None
        return not absent and value not in facts.get("EXPECTED_UNAVAILABLE", cls.EXPECTED_UNAVAILABLE)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Every test on every layout; one that takes a ``value`` on each value that the layout serves."""
        cls = metafunc.cls
        if "value" not in metafunc.fixturenames:
            metafunc.parametrize("layout", list(cls.LAYOUTS), indirect=True)
            return
        kinds = getattr(metafunc.function, "values", None)
        values = cls.all_values() if kinds is None else [value for kind in kinds for value in cls.of_kind(kind)]
        pairs = [(layout, value) for layout in cls.LAYOUTS for value in values if cls.has(layout, value)]
        metafunc.parametrize(("layout", "value"), pairs, indirect=["layout"])

    @pytest.fixture(autouse=True)
    def layout(self, request: Any, tmp_path_factory: Any) -> str:
        name = request.param
        for fact, value in self.facts_of(name).items():
            setattr(self, fact, value)
        key = (type(self), name)
        if key not in _checkpoints:
            directory = tmp_path_factory.mktemp(f"{type(self).__name__}-{name}")
            _checkpoints[key] = self.CHECKPOINT(self, name, directory)
        self.loaded = _checkpoints[key]
        self.layout_name = name
        return name

    # -- what a test uses ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The standardized model, loaded with its weights."""
        return self.loaded.model

    @property
    def bare(self) -> Any:
        """Another copy of the checkpoint, loaded by transformers alone."""
        return self.loaded.bare

    @property
    def ids(self) -> Tensor:
        """Token ids of two rows, six tokens each."""
        return self.loaded.ids

    @cached_property
    def family(self) -> Any:
        """The family's module."""
        from nnterp import families

        return families.lookup(self.FAMILY) if isinstance(self.FAMILY, str) else self.FAMILY

    @property
    def everything(self) -> dict[tuple[str, int | None], Tensor]:
        """Every value of a plain trace of `ids`, read through nnterp in one trace, by ``(value, block)``."""
        if self.loaded.everything is None:
            self.loaded.everything = self.read_all(self.model)
        return self.loaded.everything

    def read_all(self, model: Any, inputs: Any = None, values: Iterable[str] = ()) -> dict:
        """Every value this layout serves, or ``values``, as one trace of ``model`` reads them."""
        places = self.places(values or self.served(), model)
        hosts = [self.host(*place, model) for place in places]
        with model.trace(self.ids if inputs is None else inputs):
            read = [].save()
            for host, name in hosts:
                read.append(getattr(host, name).detach().clone())
        return dict(zip(places, read, strict=True))

    @property
    def blocks(self) -> range:
        return range(self.bare.config.get_text_config().num_hidden_layers)

    def rest_of_block(self, block: Callable[[str], nn.Module], mid: Tensor) -> Tensor:
        """What the bare block returns once its stream between the sublayers is ``mid``."""
        return mid + block("mlp")(block("post_attention_layernorm")(mid))

    def mid_sum(self, block_values: Callable[[str], Tensor]) -> Tensor:
        """What ``layer_mid`` is in terms of the block's other values."""
        return block_values("layer_input") + block_values("self_attn.attention_output")

    def contribution_sum(self, block_values: Callable[[str], Tensor]) -> Tensor:
        """What ``layer_output`` is in terms of the block's other values."""
        return sum(block_values(part) for part in self.contributions()) + block_values("layer_input")

    def mixers(self, layer: int) -> list[str]:
        """The modules that block ``layer`` calls with its stream after the first norm."""
        return ["self_attn"]

    def contributions(self) -> list[str]:
        """The values that the block adds to its stream."""
        return [*self.of_kind("self_attn.attention_output"), *self.of_kind("mlp.mlp_output")]

    def visible(self, layer: int) -> Tensor:
        """The keys that each query of `ids` may see at most, ``[query, key]``."""
        return torch.ones(self.ids.shape[1], self.ids.shape[1], dtype=torch.bool).tril()

    def prepare(self, model: nn.Module) -> None:
        """What a tiny checkpoint has beside random parameters (a table in a buffer), written before it is saved."""

    # -- names --------------------------------------------------------------------------------------------------------

    def native(self, path: str) -> str | None:
        """The native path of a standard path, for any block."""
        if path in self.NATIVE:
            return self.NATIVE[path]
        if not path.startswith("layers."):
            return path
        _, index, *rest = path.split(".")
        blocks = self.NATIVE.get("layers", "layers")
        for cut in range(len(rest), 0, -1):
            known = ".".join(("layers.0", *rest[:cut]))
            if known in self.NATIVE:
                start = self.NATIVE[known]
                if start is None:
                    return None
                tail = start.removeprefix(f"{blocks}.0.")
                return ".".join((blocks, index, tail, *rest[cut:]))
        return ".".join((blocks, index, *rest))

    def module(self, path: str, bare: Any = None) -> nn.Module:
        """The module of a standard path in `bare`, or in another copy; AttributeError where it has none there."""
        bare = self.bare if bare is None else bare
        if not path:
            return bare
        try:
            return bare.get_submodule(self.native(path))
        except AttributeError as error:
            raise AttributeError(
                f"{path} is not at {self.native(path)!r} in the bare model ({error}): state in NATIVE where it is"
            ) from error

    @classmethod
    def roles(cls) -> dict[str, str]:
        """The component of each envoy of a block that carries values, by its standard path (``""``: the block)."""
        return {"": "Layer", **dict.fromkeys(cls.ATTENTIONS, "Attention"), **dict.fromkeys(cls.MLPS, "Mlp")}

    @classmethod
    def of_kind(cls, value: str) -> list[str]:
        """A value of the plain block on each of the modules that have it: one, or several of a list."""
        host, _, name = value.rpartition(".")
        hosts = {"self_attn": cls.ATTENTIONS, "mlp": cls.MLPS}.get(host)
        return [value] if hosts is None else [f"{each}.{name}" for each in hosts]

    def where(self, value: str) -> Site | Inside | Within:
        """The place of a value in the bare model."""
        if value in self.SITES:
            return self.SITES[value]
        host, _, name = value.rpartition(".")
        plain = {"Attention": "self_attn", "Mlp": "mlp"}.get(self.roles().get(host), host)
        site = SITES[f"{plain}.{name}".lstrip(".")]
        if plain == host or not isinstance(site, Site):
            return site
        return replace(site, module=host + site.module.removeprefix(plain))

    def site(self, value: str, layer: int | None, bare: Any) -> tuple[nn.Module, Site | Inside | Within]:
        """The module and the site of a value in ``bare``."""
        site = self.where(value)
        if isinstance(site, Inside):
            return self.module(f"layers.{layer}.{value.rpartition('.')[0]}", bare), site
        if isinstance(site, Within):
            return self.module(f"layers.{layer}", bare), site
        if site.module.startswith("/"):
            return self.module(site.module[1:], bare), site
        return self.module(".".join(filter(None, (f"layers.{layer}", site.module))), bare), site

    def host(self, value: str, layer: int | None = None, model: Any = None) -> tuple[Any, str]:
        """The envoy that serves a value, of `model` unless another is given, and the value's own name."""
        model = self.model if model is None else model
        host, _, name = value.rpartition(".")
        if value in ROOT_ROWS:
            return model, name
        return self.envoy(model.layers[layer], host), name

    @staticmethod
    def envoy(block: Any, host: str) -> Any:
        """The envoy of a block at a standard path, ``""`` for the block itself."""
        for step in filter(None, host.split(".")):
            block = getattr(block, step)
        return block

    @classmethod
    def all_values(cls) -> list[str]:
        """Every value that is read and edited, by the name `support` gives it; a family adds what it alone has."""
        hosts = {host: getattr(components, role) for host, role in cls.roles().items()}
        block_values = [f"{host}.{name}".lstrip(".") for host, kind in hosts.items() for name in kind.values()]
        return [*block_values, *ROOT_VALUES]

    def served(self, *names: str) -> list[str]:
        """Which of ``names``, all values by default, this layout serves."""
        return [name for name in names or self.all_values() if self.has(self.layout_name, name)]

    def places(self, values: Iterable[str], model: Any = None) -> list[tuple[str, int | None]]:
        """``(value, block)`` for every block (None for a value of the root), in the order in which the model runs."""
        model = self.model if model is None else model
        found = [(v, i) for v in values for i in self.layers_of(v, self.blocks)]
        return sorted(found, key=lambda place: model.rank(*place))

    def layers_of(self, value: str, layers: Iterable[int]) -> list[int | None]:
        """Those of ``layers`` that serve ``value``; None for a value of the root."""
        return [None] if value in ROOT_VALUES else [layer for layer in layers if self.on(value, layer)]

    def on(self, value: str, layer: int) -> bool:
        """Whether block ``layer`` is expected to serve ``value``, which some block serves."""
        return True

    def block_of(self, value: str) -> int:
        """The block that edits of ``value`` are tried on."""
        return self.EDITED

    def dims(self, value: str) -> tuple[str, ...]:
        host, name = self.host(value, self.block_of(value))
        return getattr(type(host), name).dims

    # -- the oracle ---------------------------------------------------------------------------------------------------

    def inputs(self, ids: Tensor | None = None, **more: Tensor) -> dict[str, Tensor]:
        """What nnsight calls the model with for ``ids`` without padding."""
        ids = self.ids if ids is None else ids
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}

    def oracle(self, values: Any, layers: Any = None, edits: Any = None, **options: Any) -> oracles.Run:
        """Run the bare model with ``values`` of ``layers`` recorded, as ``(value, layer)``, and such pairs edited."""
        wanted = [(v, i) for v in values for i in self.layers_of(v, layers)]
        call = options.pop("call", None)
        inputs = options.pop("inputs", None) or self.inputs()
        bare = options.pop("bare", None) or self.bare
        sites = {key: self.site(*key, bare) for key in [*(edits or {}), *wanted]}  # edited before seen
        call = call or (lambda: bare(**inputs))
        return oracles.run(bare, call, sites, edits, formula=self.FORMULA, block=self.BLOCK, **options)

    def is_inside(self, value: str) -> bool:
        """Whether the value is recorded by writing attention out."""
        return isinstance(self.where(value), Inside)

    def recorded(self, value: str, steps: int = 0) -> oracles.Run:
        """A run of the bare model on `ids` with ``value`` recorded on every block: one forward pass, or generation.

        Shared by every value that is recorded the same way (by hooks, or by writing attention out).
        """
        key = (self.is_inside(value), steps)
        if key not in self.loaded.recorded:
            alike = [v for v in self.served() if self.is_inside(v) == key[0]]
            generate = (lambda: self.bare.generate(**self.inputs(), **oracles.greedy(steps))) if steps else None
            self.loaded.recorded[key] = self.oracle(alike, self.blocks, call=generate)
        return self.loaded.recorded[key]

    def edited(self, value: str, layer: int | None, edit: oracles.Edit, **options: Any) -> Tensor:
        """The logits of the bare model with one value edited."""
        return self.edited_run(value, layer, edit, **options).output.logits

    def edited_run(self, value: str, layer: int | None, edit: oracles.Edit, **options: Any) -> oracles.Run:
        """The run of the bare model with one value edited; of the stream in mid-block, at the call ``at_call``."""
        layer = None if value in ROOT_VALUES else layer
        if value == "layer_mid" and not isinstance(self.where(value), Within):
            mids = self.oracle([value], [layer], **{**options, "at_call": None}).calls[value, layer]
            mid = mids[options.get("at_call") or 0]
            bare = options.get("bare")
            output = self.rest_of_block(lambda path: self.module(f"layers.{layer}.{path}", bare), edit(mid))
            return self.oracle([], edits={("layer_output", layer): lambda _: output}, **options)
        return self.oracle([], edits={(value, layer): edit}, **options)


_checkpoints: dict[tuple[type, str], Checkpoint] = {}
