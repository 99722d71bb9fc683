"""What a vision suite states about its wrapper, its tiny checkpoint with a real processor, and what transformers alone
makes of a prompt with images.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from nnterp import checkpoints, components
from nnterp.testing import checkpoint, oracles
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close
from nnterp.testing.oracles import Formula, Inside, Site

#: The values of a tower itself, in the order of the forward.
TOWER = ("image_token_mask", "grid", "patch_embeddings", "tower_output", "image_features")

#: The values of its blocks in the order of the forward, and where each is in the plain pre-norm block.
BLOCK: dict[str, Site | Inside] = {
    "layer_input": Site("", "input"),
    "attention_norm_output": Site("input_layernorm"),
    "self_attn.attention_queries": Inside("queries"),
    "self_attn.attention_keys": Inside("keys"),
    "self_attn.attention_values": Inside("values"),
    "self_attn.attention_scores": Inside("scores"),
    "self_attn.attention_probabilities": Inside("probabilities"),
    "self_attn.attention_head_outputs": Inside("head_outputs"),
    "self_attn.attention_premix": Site("self_attn.o_proj", "input"),
    "self_attn.attention_output": Site("self_attn"),
    "layer_mid": Site("post_attention_layernorm", "input"),
    "mlp_norm_output": Site("post_attention_layernorm"),
    "mlp_input": Site("mlp", "input"),
    "mlp.mlp_activation": Site("mlp.act_fn"),
    "mlp.mlp_neurons": Site("mlp.down_proj", "input"),
    "mlp.mlp_output": Site("mlp"),
    "layer_output": Site(""),
}

#: The names in a block of CLIP's tower and of those made after it.
CLIP_BLOCK = {
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.act_fn": "mlp.activation_fn",
    "mlp.down_proj": "mlp.fc2",
}


class VisionCheckpoint:
    """A wrapper's tiny checkpoint on disk with its processor, and the copies of it that tests share."""

    def __init__(self, suite: Any, directory: Any) -> None:
        self.config = checkpoint.config(**suite.CONFIG)
        self.directory = checkpoint.save(self.config, directory, suite.prepare)
        self.own_processor = suite.processor(checkpoint.tokenizer(suite.SPECIAL))
        self.own_processor.save_pretrained(directory)
        self.given = {} if suite.PROCESSOR_LOADS else {"processor": self.own_processor}
        self.read: dict[int, dict] = {}

    def load(self, **options: Any) -> Any:
        from nnterp import StandardizedTransformer

        task = options.get("task", "image-text-to-text")
        given = self.given if task == "image-text-to-text" else {}
        options = {"task": task, "attn_implementation": "eager", "dispatch": True, **given, **options}
        return StandardizedTransformer(str(self.directory), **options)

    def load_bare(self) -> Any:
        kind = checkpoint.auto_class(self.config)
        return kind.from_pretrained(self.directory, attn_implementation="eager").eval()

    @cached_property
    def model(self) -> Any:
        return self.load()

    @cached_property
    def bare(self) -> Any:
        return self.load_bare()

    @cached_property
    def bare_processor(self) -> Any:
        from transformers import AutoProcessor

        if self.given:
            return self.own_processor
        return AutoProcessor.from_pretrained(self.directory)


class VisionFacts:
    """The facts a subclass states.

    Attributes:
        FAMILY: The ``model_type`` of the text model.
        CONFIG: Fields of a tiny config, ``model_type``, ``vision_config`` and ``text_config`` among them. Three blocks
            in the tower, and images of few patches, are a good size; image tokens are those of SPECIAL, from id 2 on.
        SPECIAL: The tokens that the processor looks for, the image's first.
        IMAGE: What stands for one image in a prompt.
        NATIVE: Native paths of ``"vision"`` (the tower), ``"projector"``, ``"layers"`` (the tower's blocks),
            ``"patch_embed"``, and ``"text"`` (the text model).
        BLOCK: The native path in a block of each standard path that differs.
        SITES: Where a value of a block is in the bare model, where the plain block's place does not hold.
        EXPECTED_UNAVAILABLE: Part of the reason by value, for each that no block has.
        IMAGE_SIZES: Width and height of the two photographs, before the processor has them.
        FLAT: Whether the tower's own tensors have no axis of images.
        READ: The block whose output the projector reads, counted from the last: edits from there on reach the text.
        SCATTERED: Whether features take the place of tokens, so the first text block is called with them.
        PROCESSOR_LOADS: Whether transformers can load the processor here; else the one of `processor` is handed over.
        TEXT_LOAD_HAS_TOWER: Whether a text-generation load builds the wrapper, and not its text model alone.
        FORMULA: The tower's attention written out, None where it is not one call over a row.
    """

    FAMILY: ClassVar[str]
    CONFIG: ClassVar[dict]
    SPECIAL: tuple[str, ...] = ("<image>",)
    IMAGE: str = "<image>"
    NATIVE: dict[str, str] = {}
    BLOCK: dict[str, str] = {}
    SITES: dict[str, Site | Inside] = {}
    EXPECTED_UNAVAILABLE: dict[str, str] = {}
    IMAGE_SIZES: tuple[tuple[int, int], tuple[int, int]] = ((60, 40), (34, 50))
    FLAT: bool = False
    READ: int = -1
    SCATTERED: bool = True
    PROCESSOR_LOADS: bool = True
    TEXT_LOAD_HAS_TOWER: bool = True
    FORMULA: Formula | None = Formula()

    loaded: VisionCheckpoint

    def processor(self, tokenizer: Any) -> Any:
        """The wrapper's processor, for images of the tiny tower's size."""
        raise NotImplementedError

    def prepare(self, model: nn.Module) -> None:
        """What the tiny checkpoint has beside random parameters, written before it is saved."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _checkpoint(cls, tmp_path_factory: Any) -> None:
        cls.loaded = VisionCheckpoint(cls(), tmp_path_factory.mktemp(cls.__name__))

    # -- what a test uses ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The standardized wrapper, loaded with its weights and its processor."""
        return self.loaded.model

    @property
    def bare(self) -> Any:
        """Another copy of the checkpoint, loaded by transformers alone."""
        return self.loaded.bare

    def images(self, count: int = 1) -> list[Any]:
        """Photographs of different sizes."""
        from PIL import Image

        paths = checkpoints.photographs()
        return [Image.open(paths[i % 2]).convert("RGB").resize(self.IMAGE_SIZES[i % 2]) for i in range(count)]

    def prompt(self, count: int = 1) -> str:
        """A prompt with ``count`` images."""
        return f"The quick {self.IMAGE * count} brown fox"

    def inputs(self, count: int = 1) -> dict[str, Any]:
        """What the processor, loaded by transformers alone, makes of `prompt` and `images`."""
        named = {"images": self.images(count)} if count else {}
        return dict(self.loaded.bare_processor(text=self.prompt(count), return_tensors="pt", **named))

    @property
    def tower_layers(self) -> range:
        return range(len(self.bare.get_submodule(self.NATIVE["layers"])))

    @property
    def read(self) -> int:
        """The index of the block whose output the projector reads."""
        return self.READ % len(self.tower_layers)

    def native(self, layer: int, path: str) -> nn.Module:
        """The bare module at a standard path in block ``layer`` of the tower."""
        steps = path.split(".")
        for cut in range(len(steps), 0, -1):
            known = self.BLOCK.get(".".join(steps[:cut]))
            if known is not None:
                path = ".".join((known, *steps[cut:]))
                break
        block = self.bare.get_submodule(f"{self.NATIVE['layers']}.{layer}")
        return block.get_submodule(path) if path else block

    def has(self, value: str) -> bool:
        return value not in self.EXPECTED_UNAVAILABLE

    def block_values(self) -> list[str]:
        """The values that the tower's blocks are expected to serve, in the order of the forward."""
        return [value for value in BLOCK if self.has(value)]

    def sites(self, values: Iterable[str]) -> dict[tuple[str, int], tuple[nn.Module, Site | Inside]]:
        """The bare module and the site of ``values`` in every block of the tower."""
        found = {}
        for value in values:
            site = self.SITES.get(value, BLOCK[value])
            host = value.rpartition(".")[0] if isinstance(site, Inside) else site.module
            for layer in self.tower_layers:
                found[value, layer] = self.native(layer, host), site
        return found

    def shaped(self, value: str, tensor: Tensor) -> Tensor:
        """A tensor of the bare tower as nnterp serves it: with the axis of images, and heads apart."""
        tensor = tensor.unsqueeze(0) if self.FLAT and tensor.dim() == 2 else tensor
        return tensor.unflatten(-1, (self.model.vision.num_heads, -1)) if value.endswith("premix") else tensor

    def host(self, value: str, layer: int) -> tuple[Any, str]:
        """The envoy of the tower's block that serves ``value``, and the value's own name."""
        host, _, name = value.rpartition(".")
        block = self.model.vision.layers[layer]
        return (getattr(block, host) if host else block), name

    def bare_run(
        self, count: int = 1, values: Iterable[str] = (), edits: dict | None = None, more: dict | None = None
    ) -> oracles.Run:
        """The bare model on `inputs`, with hooks at ``values`` of the tower's blocks and at the sites of ``more``.

        ``"text_input"`` is what the first text block is called with.
        """
        text = self.bare.get_submodule(self.NATIVE["text"])
        sites: dict[Any, Any] = {
            **self.sites(values),
            "text_input": (text.layers[0], Site("", "input")),
            **(more or {}),
        }
        with torch.no_grad():
            call: Callable = lambda: self.bare(**self.inputs(count))  # noqa: E731
            return oracles.run(self.bare, call, sites, edits, formula=self.FORMULA, first=True)

    def everything(self, count: int = 1) -> dict[Any, Any]:
        """Every value of the tower and its blocks from one trace, by name or ``(value, layer)``; the first text
        block's input and the logits.
        """
        if count not in self.loaded.read:
            model, vision = self.model, self.model.vision
            places = [(value, layer) for layer in self.tower_layers for value in self.block_values()]
            with torch.no_grad(), model.trace(self.prompt(count), images=self.images(count)):
                read: dict = {}.save()
                read["image_token_mask"] = vision.image_token_mask.clone()
                read["patch_embeddings"] = vision.patch_embeddings.clone()
                for value, layer in places:
                    host, name = self.host(value, layer)
                    read[value, layer] = getattr(host, name).clone()
                read["grid"] = vision.grid
                read["tower_output"] = vision.tower_output.clone()
                read["image_features"] = vision.image_features.clone()
                read["text_input"] = model.layers[0].layer_input.clone()
                read["logits"] = model.logits.clone()
            self.loaded.read[count] = read
        return self.loaded.read[count]

    def assert_logits(self, actual: Tensor, expected: Tensor) -> None:
        assert_close(actual, expected, ulps=ULPS_AFTER_MODEL)

    @property
    def classes(self) -> dict[str, type]:
        return {"": components.VisionLayer, "self_attn": components.VisionAttention, "mlp": components.VisionMlp}
