"""What holds of every wrapper that has Qwen's tower, which packs its images and attends to them one by one.

There is no one call of the attention function to write out, so the interior's oracle is the bare projection's output,
its queries and keys turned by the rotary formula at the rows and columns of the patches. Those are told by what the
bare tower embeds, compared with the pixels of the photographs.
"""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from nnterp import Unavailable
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.mistakes import mistake
from nnterp.testing.oracles import Call, Site
from nnterp.testing.vision import VisionSuite

#: A text model whose heads are 8 wide, their four pairs given to the three axes of a position.
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
#: A tower whose heads are 8 wide, half of each turned by a patch's row and half by its column.
TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_heads": 4, "patch_size": 4}
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TOKENS = {"image_token_id": 2, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}


class QwenSuite(VisionSuite):
    """What holds of each of them; a subclass's config has TOKENS, TEXT and TOWER, or sizes like theirs.

    Attributes:
        PROCESSOR: The name of the wrapper's processor in transformers.
        WINDOW, WINDOWED: The side of a window in patches, and the blocks of the tower that attend within windows.
        BETWEEN_FRAMES: What a prompt has between the tokens of two frames of a video.
    """

    PROCESSOR: ClassVar[str]
    WINDOW: int | None = None
    WINDOWED: tuple[int, ...] = ()
    BETWEEN_FRAMES: tuple[int, ...] = ()
    SPECIAL = SPECIAL
    IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
    FLAT = True
    FORMULA = None
    PROCESSOR_LOADS = False
    #: Three by five merge blocks and four by two.
    IMAGE_SIZES = ((40, 24), (17, 30))
    GRID = [(6, 10), (8, 4)]
    NATIVE = {
        "vision": "model.visual",
        "projector": "model.visual.merger",
        "patch_embed": "model.visual.patch_embed",
        "layers": "model.visual.blocks",
        "text": "model.language_model",
    }
    BLOCK = {
        "self_attn": "attn",
        "self_attn.o_proj": "attn.proj",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
    }
    EXPECTED_UNAVAILABLE = dict.fromkeys(
        ("self_attn.attention_scores", "self_attn.attention_probabilities"), "once per image"
    )

    def processor(self, tokenizer: Any) -> Any:
        import transformers
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        class Pillow(getattr(transformers, self.PROCESSOR)):
            """The wrapper's processor, without its part for videos, which needs torchvision."""

            @classmethod
            def get_attributes(cls) -> list[str]:
                return ["image_processor", "tokenizer"]

            def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
                return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)

        return Pillow(Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096), tokenizer)

    # -- patches ------------------------------------------------------------------------------------------------------

    def pixels(self, count: int) -> list[Tensor]:
        """The images, put together from the patches that the processor cuts them into, merge block by merge block."""
        found, inputs = [], self.inputs(count)
        sizes = inputs["image_grid_thw"].tolist()
        each = inputs["pixel_values"].split([rows * columns for _, rows, columns in sizes])
        for patches, (_, rows, columns) in zip(each, sizes, strict=True):
            cut = patches.view(rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)
            assert_same(cut[..., 0, :, :], cut[..., 1, :, :])
            found.append(cut[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 4, columns * 4))
        return found

    def test_pixels_are_the_photographs(self):
        """Resized and normed without the processor, they are what its patches put together give."""
        import numpy
        from PIL import Image

        mean, deviation = (
            torch.tensor(getattr(self.loaded.own_processor.image_processor, name)).view(3, 1, 1)
            for name in ("image_mean", "image_std")
        )
        for image, pixels in zip(self.images(2), self.pixels(2), strict=True):
            resized = image.resize(pixels.shape[:0:-1], Image.Resampling.BICUBIC)
            plain = torch.from_numpy(numpy.array(resized)).permute(2, 0, 1).float() / 255
            assert_close(pixels, (plain - mean) / deviation)

    def embedded(self, embed: Any, image: Tensor) -> Tensor:
        patches = image.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4)
        twice = patches.unsqueeze(3).expand(-1, -1, -1, 2, -1, -1)
        embed = self.bare.get_submodule("model.visual.patch_embed")
        return embed(twice.flatten(0, 1).flatten(1)).detach().unflatten(0, twice.shape[:2])

    def places(self, count: int) -> Tensor:
        """Image, row and column of each patch in the order of the bare tower: where the pixels lie that it embeds."""
        if ("places", count) not in self.loaded.read:
            self.loaded.read["places", count] = self.placed(count)
        return self.loaded.read["places", count]

    def placed(self, count: int) -> Tensor:
        """`places`, worked out."""
        module = self.bare.get_submodule(self.NATIVE["patch_embed"])
        patches = self.bare_run(count, more={"patches": (module, self.PATCH_SITE)})["patches"]
        images = [self.embedded(None, image) for image in self.pixels(count)]
        every = torch.tensor(
            [(i, r, c) for i, image in enumerate(images) for r in range(len(image)) for c in range(image.shape[1])]
        )
        nearest = torch.cdist(torch.cat([image.flatten(0, 1) for image in images]), patches).argmin(0)
        assert sorted(nearest.tolist()) == list(range(len(patches)))
        return every[nearest]

    def test_grid(self):
        assert self.everything(2)["grid"] == self.GRID and self.everything(1)["grid"] == self.GRID[:1]

    def test_patches_are_in_the_order_of_the_blocks(self):
        """What was edited at a row and column of `patch_embeddings` is what changes there in the first block."""
        model, vision, read = self.model, self.model.vision, self.everything(2)
        place = self.places(2).tolist().index([1, 5, 2])
        with torch.no_grad(), model.trace(self.prompt(2), images=self.images(2)):
            vision.patch_embeddings[0, place] += 1.0
            entering = vision.layers[0].layer_input.clone().save()
        changed = vision.patch_map((entering - read["layer_input", 0]).norm(dim=-1), read["grid"])
        assert not changed[0].any() and (changed[1] > 0).nonzero().tolist() == [[5, 2]]

    def test_sizes_of_its_own(self):
        vision = self.model.vision
        assert vision.num_heads == self.model._module.config.vision_config.num_heads == 4
        assert vision.spatial_merge_size == 2
        assert vision.window_size == (self.WINDOW and 4 * self.WINDOW)
        with mistake(Unavailable, "image_size", "any resolution"):
            vision.image_size  # here # noqa: B018

    def test_a_map_outside_the_trace_needs_the_grid(self):
        norms = self.everything(2)["layer_output", 0].norm(dim=-1)
        with mistake(ValueError, "grid", r"patch_map\(values, grid\)"):
            self.model.vision.patch_map(norms)  # here
        for image, laid in enumerate(self.model.vision.patch_map(norms, self.GRID)):
            for place, norm in zip(self.places(2).tolist(), norms[0], strict=True):
                assert place[0] != image or laid[place[1], place[2]] == norm

    def test_a_map_of_a_grid_that_no_merge_blocks_fill(self):
        """As many patches as there are, in an odd number of rows: blocks would be left out."""
        with mistake(ValueError, "patch_map", r"\(5, 12\)"):
            self.model.vision.patch_map(torch.zeros(1, 60, 3), [(5, 12)])  # here

    def test_frames_of_a_video_are_images(self):
        """The tower lays a video of two frames out as two images are, and attends within each."""
        model, frames = self.model, torch.tensor([[2, *self.GRID[0]]])
        pixels = torch.randn(2 * 60, 96, generator=torch.Generator().manual_seed(3))
        ids = torch.tensor([[40, *[3] * 15, *self.BETWEEN_FRAMES, *[3] * 15, 41]])
        inputs = {
            "input_ids": ids,
            "pixel_values_videos": pixels,
            "video_grid_thw": frames,
            "mm_token_type_ids": torch.where(ids == 3, 2, 0),
        }
        with torch.no_grad(), model.trace(**inputs):
            maps = model.vision.patch_map(model.vision.patch_embeddings).save()
            grid = model.vision.grid.save()
        assert grid == [self.GRID[0]] * 2
        embed = self.bare.get_submodule("model.visual.patch_embed")
        expected = embed(pixels).detach().view(2, 3, 5, 2, 2, -1).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        assert_close(torch.stack(maps), expected)

    def test_an_image_and_a_video(self):
        """The tower runs once for each: whose patches a map is of has to be said."""
        model = self.model
        (rows, columns), (high, wide) = self.GRID
        generator = torch.Generator().manual_seed(3)
        ids = torch.tensor([[40, 4, *[2] * 15, 5, 41, 4, *[3] * 8, 5, 42]])
        inputs = {
            "input_ids": ids,
            "pixel_values": torch.randn(rows * columns, 96, generator=generator),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
            "pixel_values_videos": torch.randn(high * wide, 96, generator=generator),
            "video_grid_thw": torch.tensor([[1, high, wide]]),
            "mm_token_type_ids": torch.where(ids == 2, 1, torch.where(ids == 3, 2, 0)),
        }
        with torch.no_grad(), model.trace(**inputs):
            stream = model.vision.layers[0].layer_output.save()
            features = model.vision.image_features.save()
            model.layers[0].layer_input.save()
            grid = model.vision.grid.save()
            laid = model.vision.patch_map(stream, grid).save()
        assert len(features) == 15 and grid == [(rows, columns)] and laid[0].shape[:2] == (rows, columns)
        with mistake(ValueError, "2 times", r"patch_map\(values, grid\)"), model.trace(**inputs):
            stream = model.vision.layers[0].layer_output
            model.layers[0].layer_input.save()
            model.vision.patch_map(stream)  # here

    # -- attention ----------------------------------------------------------------------------------------------------

    def rotated(self, heads: Tensor, sign: int = 1) -> Tensor:
        """``[patches, heads, width]`` with its pairs ``(i, i + half)`` turned: half by the patch's row, half by its
        column.
        """
        places = self.places(1 if len(heads) == 60 else 2)
        frequencies = 10000.0 ** (-torch.arange(2) / 2)
        angles = sign * (places[:, 1:, None] * frequencies).flatten(1).unsqueeze(1)
        first, second = heads.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    def projected(self, part: int) -> Site:
        """The site of queries, keys or values: a third of what the bare projection returns, turned by the formula."""
        turned = part < 2

        def read(call: Call, tensor: Tensor) -> Tensor:
            heads = tensor.view(len(tensor), 3, 4, 8)[:, part]
            return (self.rotated(heads) if turned else heads).transpose(0, 1).unsqueeze(0)

        def write(call: Call, tensor: Tensor, value: Tensor) -> Tensor:
            heads, parts = value[0].transpose(0, 1), tensor.view(len(tensor), 3, 4, 8).clone()
            parts[:, part] = self.rotated(heads, -1) if turned else heads
            return parts.flatten(1)

        return Site("self_attn.qkv", read=read, write=write)

    @property
    def SITES(self) -> dict[str, Site]:  # noqa: N802
        """The whole interior, from modules of the bare attention."""
        self.places(1), self.places(2)  # known before a hook asks, which would run the model inside itself
        heads = Site(
            "self_attn.o_proj",
            "input",
            read=lambda call, tensor: tensor.view(1, len(tensor), 4, 8),
            write=lambda call, tensor, value: value.view(tensor.shape),
        )
        interior = {f"attention_{name}": self.projected(i) for i, name in enumerate(("queries", "keys", "values"))}
        return {f"self_attn.{name}": site for name, site in {**interior, "attention_head_outputs": heads}.items()}

    @pytest.mark.parametrize("count", [1, 2])
    def test_heads_mix_what_lies_in_their_image_or_window(self, count):
        """The attention written out, on what is served, between the patches that see each other."""
        read, places = self.everything(count), self.places(count)
        for layer in self.tower_layers:
            queries, keys, values = (read[f"self_attn.attention_{n}", layer][0] for n in ("queries", "keys", "values"))
            near = places.clone()
            near[:, 1:] = near[:, 1:] // self.WINDOW if layer in self.WINDOWED else 0
            apart = (near[:, None] != near[None]).any(-1)
            pattern = (queries @ keys.mT / 8**0.5).masked_fill(apart, -torch.inf).softmax(-1)
            mixed = (pattern @ values).transpose(0, 1)
            assert_close(read["self_attn.attention_head_outputs", layer][0], mixed)

    def test_interior_under_sdpa(self):
        model = self.loaded.load(attn_implementation="sdpa")
        attention = model.vision.layers[1].self_attn
        reasons = {name: attention.support()[name] for name in ("attention_scores", "attention_probabilities")}
        assert all("once per image" in reason for reason in reasons.values())
        with mistake(Unavailable, "attention_probabilities", "cu_seqlens"), model.trace(self.prompt(0)):
            attention.attention_probabilities.save()  # here
        names = ("attention_queries", "attention_keys", "attention_values", "attention_head_outputs")
        with torch.no_grad(), model.trace(self.prompt(2), images=self.images(2)):
            got = [getattr(attention, name).clone() for name in names].save()
        for name, value in zip(names, got, strict=True):
            assert_close(value, self.everything(2)[f"self_attn.{name}", 1], ULPS_AFTER_MODEL)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def test_a_block_skipped(self):
        model, block = self.model, self.model.vision.layers[1]
        with torch.no_grad(), model.trace(self.prompt(2), images=self.images(2)):
            block.skip_with(block.layer_input)
            logits = model.logits.save()
        bare = self.native(1, "")
        handle = bare.register_forward_hook(lambda module, args, output: args[0])
        with torch.no_grad():
            assert_same(logits, self.bare(**self.inputs(2)).logits)
        handle.remove()
        assert_differs(logits, self.everything(2)["logits"])
