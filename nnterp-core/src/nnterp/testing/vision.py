"""`VisionSuite`: what holds of the image side of every multimodal wrapper."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp import Vision, components, families
from nnterp.components.vision.layouts import ImageFeatures, ImageTokenMask, Patches
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import edit_of, moved
from nnterp.testing.mistakes import mistake
from nnterp.testing.oracles import Site
from nnterp.testing.vision_facts import BLOCK, TOWER
from nnterp.testing.vision_prompts import VisionPrompts

COUNTS = pytest.mark.parametrize("count", [1, 2])


def each_value(values: Any) -> Any:
    return pytest.mark.parametrize("value", list(values))


class VisionSuite(VisionPrompts):
    """Subclass it, state the wrapper's facts (`nnterp.testing.vision_facts.VisionFacts`), and let pytest collect it."""

    # -- names and sizes ----------------------------------------------------------------------------------------------

    def test_names(self):
        model = self.model
        assert isinstance(model.vision, Vision)
        assert model.family is families.lookup(self.FAMILY)
        for name in ("vision", "projector"):
            assert getattr(model, name)._module is model._module.get_submodule(self.NATIVE[name])
        assert len(model.vision.layers) == len(self.tower_layers) > 1
        for host, kind in self.classes.items():
            for layer in self.tower_layers:
                envoy = self.host(f"{host}.x", layer)[0] if host else model.vision.layers[layer]
                assert isinstance(envoy, kind)

    def test_no_name_of_the_tower_on_a_text_block(self):
        for block in self.model.layers:
            for envoy in block.modules():
                assert not isinstance(envoy, components.VisionLayer | components.VisionAttention | components.VisionMlp)
            assert set(block._aliases) <= {*BLOCK, "self_attn", "mlp", "linear_attn", *self.text_aliases()}

    def text_aliases(self) -> set[str]:
        """The names that the text family itself gives to modules of a block."""
        return {
            alias
            for names in self.model.family.RENAME.values()
            for alias in ([names] if isinstance(names, str) else names)
        }

    def test_sizes(self):
        vision, tower = self.model.vision, self.bare.get_submodule(self.NATIVE["vision"])
        output = self.everything()["layer_output", 0]
        assert vision.num_layers == len(self.tower_layers)
        assert vision.vision_hidden_size == output.shape[-1]
        assert vision.num_heads * vision.head_dim == vision.vision_hidden_size
        assert vision.intermediate_size == self.everything()["mlp.mlp_neurons", 0].shape[-1]
        assert vision.patch_size == tower.config.patch_size
        assert self.model.hidden_size == self.everything()["text_input"].shape[-1]
        assert components.axis_size(vision, "hidden_size") == self.model.hidden_size
        assert components.axis_size(vision.layers[0], "vision_hidden_size") == output.shape[-1]

    def test_support(self):
        rows = self.model.vision.support()
        assert set(rows) == {*TOWER, *BLOCK}
        for value, reason in rows.items():
            if value in self.EXPECTED_UNAVAILABLE:
                reasons = list(reason.values()) if isinstance(reason, dict) else [reason]
                assert all(self.EXPECTED_UNAVAILABLE[value] in each for each in reasons)
            else:
                assert reason is None, f"{value}: {reason}"
        prefixed = {name for name in self.model.support() if name.startswith("vision.")}
        assert prefixed == {f"vision.{name}" for name in rows}
        assert set(self.model.vision.support(layer=0)) == set(BLOCK)

    # -- values -------------------------------------------------------------------------------------------------------

    @COUNTS
    def test_layouts(self, count):
        read = self.everything(count)
        assert isinstance(read["image_token_mask"], ImageTokenMask)
        assert isinstance(read["image_features"], ImageFeatures)
        for value in ("patch_embeddings", "tower_output"):
            assert isinstance(read[value], Patches)
        for value in self.block_values():
            host, name = self.host(value, 0)
            assert isinstance(read[value, 0], getattr(type(host), name).layout), value

    @COUNTS
    def test_image_tokens(self, count):
        read, inputs = self.everything(count), self.inputs(count)
        assert_same(read["image_token_mask"], inputs["input_ids"] == self.model.vision.image_token_id)
        assert read["image_token_mask"].any()

    @COUNTS
    def test_features_are_what_the_first_text_block_is_called_with(self, count):
        read, bare = self.everything(count), self.bare_run(count)
        assert_same(read["text_input"], bare["text_input"])
        if self.SCATTERED:
            assert_same(read["text_input"][read["image_token_mask"]], read["image_features"])
        assert_same(read["logits"], bare.output.logits)

    @COUNTS
    def test_blocks(self, count):
        values = [value for value in self.block_values() if self.checked_by_hook(value)]
        read, bare = self.everything(count), self.bare_run(count, values)
        for value in values:
            for layer in self.tower_layers:
                assert_close(read[value, layer], self.shaped(value, bare[value, layer]))

    def checked_by_hook(self, value: str) -> bool:
        """Whether hooks on the bare tower see ``value``; the suite of a wrapper checks another its own way."""
        return self.FORMULA is not None or not isinstance(
            self.SITES.get(value, BLOCK[value]), type(BLOCK["self_attn.attention_queries"])
        )

    @COUNTS
    def test_identity(self, count):
        read = self.everything(count)
        for layer in self.tower_layers:
            parts = ("layer_input", "self_attn.attention_output", "mlp.mlp_output")
            assert_close(sum(read[part, layer] for part in parts), read["layer_output", layer])
            assert_close(
                read["layer_input", layer] + read["self_attn.attention_output", layer], read["layer_mid", layer]
            )

    @COUNTS
    def test_pattern(self, count):
        if not self.has("self_attn.attention_probabilities"):
            return
        read = self.everything(count)
        for layer in self.tower_layers:
            pattern = read["self_attn.attention_probabilities", layer]
            assert_close(pattern.sum(-1), torch.ones_like(pattern.sum(-1)))
            assert_close(read["self_attn.attention_scores", layer].softmax(-1), pattern)
            rows, positions = read["layer_output", layer].shape[:2]
            assert pattern.shape == (rows, self.model.vision.num_heads, positions, positions)

    @COUNTS
    def test_recorded_attentions(self, count):
        """transformers' own record of the tower's patterns, where its tower keeps one."""
        if not self.has("self_attn.attention_probabilities"):
            return
        patterns: list[Tensor] = []
        handles = [
            self.native(layer, "self_attn").register_forward_hook(
                lambda module, args, output: patterns.append(output[1])
            )
            for layer in self.tower_layers
        ]
        with torch.no_grad():
            self.bare(**self.inputs(count))
        for handle in handles:
            handle.remove()
        for layer in self.tower_layers:
            assert_same(self.everything(count)["self_attn.attention_probabilities", layer], patterns[layer])

    @COUNTS
    def test_tower_output(self, count):
        read = self.everything(count)
        last = read["layer_output", self.tower_layers[-1]]
        norm = self.final_norm()
        assert_close(read["tower_output"], last if norm is None else norm(last).detach())

    @pytest.mark.parametrize("in_place", [False, True])
    def test_tower_output_written(self, in_place):
        """It comes as far as the same edit by a torch hook does: not at all where the projector reads another block."""
        got = self.traced_edit("tower_output", moved, in_place)

        def native(tensor: Tensor) -> Tensor:
            return moved(self.shaped("", tensor)).reshape(tensor.shape)

        bare = self.bare_run(more={"tower_output": (self.last_of_tower(), Site(""))}, edits={"tower_output": native})
        assert_close(got["text_input"], bare["text_input"], ulps=ULPS_AFTER_MODEL)
        self.assert_logits(got["logits"], bare.output.logits)

    def last_of_tower(self) -> Any:
        """The bare module whose output is ``tower_output``."""
        return self.final_norm() or self.native(self.tower_layers[-1], "")

    def final_norm(self) -> Any:
        """The bare norm over the patches behind the last block, or None."""
        name = self.model.vision.NORM
        return None if name is None else self.bare.get_submodule(f"{self.NATIVE['vision']}.{name}")

    # -- patches on the image -----------------------------------------------------------------------------------------

    def pixels(self, count: int) -> list[Tensor]:
        """What the tower sees of each image (crop, tile), ``[channels, height, width]``, in its order."""
        return list(self.inputs(count)["pixel_values"].flatten(0, -4))

    @COUNTS
    def test_patches_lie_on_the_image(self, count):
        """The patch at a row and column is the embedding of the pixels that lie there."""
        read, vision = self.everything(count), self.model.vision
        embed = self.bare.get_submodule(self.NATIVE["patch_embed"])
        pixels = self.pixels(count)
        assert read["grid"] == [tuple(side // vision.patch_size for side in image.shape[-2:]) for image in pixels]
        maps = self.model.vision.patch_map(read["patch_embeddings"], read["grid"])
        for image, laid in zip(pixels, maps, strict=True):
            assert_close(laid, self.embedded(embed, image), ulps=ULPS_AFTER_MODEL)

    def embedded(self, embed: Any, image: Tensor) -> Tensor:
        """The bare embedding of each patch of ``image``, ``[rows, columns, vision_hidden_size]``."""
        return embed(image.unsqueeze(0))[0].permute(1, 2, 0).detach()

    def test_a_map_in_the_trace(self):
        model = self.model
        with torch.no_grad(), model.trace(self.prompt(), images=self.images()):
            heat = model.vision.patch_map(model.vision.layers[0].layer_output.norm(dim=-1)).save()
            grid = model.vision.grid.save()
        assert [tuple(each.shape) for each in heat] == grid
        norms = self.everything()["layer_output", 0].norm(dim=-1)
        for got, expected in zip(heat, model.vision.patch_map(norms, grid), strict=True):
            assert_same(got, expected)
        with pytest.raises(ValueError, match="patch_map"):
            model.vision.patch_map(norms[:, 1:-1], [(rows + 1, columns) for rows, columns in grid])

    def test_a_map_of_another_grid(self):
        """None, an image less, and a row more in each: not the patches that are there."""
        vision, read = self.model.vision, self.everything(2)
        norms, grid = read["layer_output", 0].norm(dim=-1), read["grid"]
        for wrong in ([], grid[1:], [(rows + 1, columns) for rows, columns in grid]):
            with mistake(ValueError, "patch_map", "shape"):
                vision.patch_map(norms, wrong)  # here
        with mistake(ValueError, "patch_map", "shape"):
            vision.patch_map(norms[0, 0], grid)  # here

    def test_a_map_outside_the_trace(self):
        """Every image (tile) as in it; where it cannot be known how they lie, the grid is asked for."""
        vision, read = self.model.vision, self.everything(2)
        for values in (read["patch_embeddings"], read["layer_output", 0], read["tower_output"]):
            if vision.usual_grid(values) is None:
                with mistake(ValueError, "grid", r"patch_map\(values, grid\)"):
                    vision.patch_map(values)  # here
                continue
            maps = vision.patch_map(values)
            assert [tuple(each.shape[:2]) for each in maps] == read["grid"]
            for got, expected in zip(maps, vision.patch_map(values, read["grid"]), strict=True):
                assert_same(got, expected)

    # -- writes -------------------------------------------------------------------------------------------------------

    def traced_edit(self, name: str, edit: Any, in_place: bool, layer: int | None = None) -> dict[str, Tensor]:
        """A trace with one edit: the features, the first text block's input and the logits."""
        model = self.model
        host, own = (model.vision, name) if layer is None else self.host(name, layer)
        with torch.no_grad(), model.trace(self.prompt(), images=self.images()):
            read: dict = {}.save()
            value = getattr(host, own)
            if in_place:
                value[:] = edit(value.clone())
            else:
                setattr(host, own, edit(value.clone()))
            if name != "image_features":
                read["image_features"] = model.vision.image_features.clone()
            read["text_input"] = model.layers[0].layer_input.clone()
            read["logits"] = model.logits.clone()
        return read

    @pytest.mark.parametrize("in_place", [False, True])
    def test_features_written(self, in_place):
        if not self.SCATTERED:
            return
        clean = self.everything()
        got = self.traced_edit("image_features", moved, in_place)
        mask = clean["image_token_mask"]
        assert_same(got["text_input"][~mask], clean["text_input"][~mask])
        assert_same(got["text_input"][mask], moved(clean["image_features"]))

        def rows(hidden: Tensor) -> Tensor:
            hidden[mask] = moved(hidden[mask])
            return hidden

        bare = self.bare_run(edits={"text_input": rows})
        self.assert_logits(got["logits"], bare.output.logits)
        assert_differs(got["logits"], clean["logits"])

    @pytest.mark.parametrize("in_place", [False, True])
    @each_value(value for value in BLOCK if value != "layer_mid")
    def test_a_write_reaches_the_text(self, value, in_place):
        """The same edit by a torch hook on the bare tower gives the same features and logits."""
        if not self.has(value) or not self.checked_by_hook(value):
            return
        layer = self.read
        edit = edit_of(value)
        got = self.traced_edit(value, edit, in_place, layer)

        def native(tensor: Tensor) -> Tensor:
            return edit(self.shaped(value, tensor)).reshape(tensor.shape)

        bare = self.bare_run(values=[value], edits={(value, layer): native})
        assert_close(got["text_input"], bare["text_input"], ulps=ULPS_AFTER_MODEL)
        self.assert_logits(got["logits"], bare.output.logits)
        assert_differs(got["image_features"], self.everything()["image_features"])

    @pytest.mark.parametrize("in_place", [False, True])
    def test_the_stream_between_the_sublayers_written(self, in_place):
        """Both what the MLP is called with and what its output is added to."""
        layer = self.read
        mid = moved(self.everything()["layer_mid", layer])
        got = self.traced_edit("layer_mid", moved, in_place, layer)
        with torch.no_grad():
            output = self.rest_of_block(layer, mid.squeeze(0) if self.FLAT else mid)
        bare = self.bare_run(values=["layer_output"], edits={("layer_output", layer): lambda tensor: output})
        assert_close(got["text_input"], bare["text_input"], ulps=ULPS_AFTER_MODEL)

    def rest_of_block(self, layer: int, mid: Tensor) -> Tensor:
        """What the bare block returns once its stream between the sublayers is ``mid``."""
        return mid + self.native(layer, "mlp")(self.native(layer, "post_attention_layernorm")(mid))

    @pytest.mark.parametrize("in_place", [False, True])
    def test_patch_embeddings_written(self, in_place):
        got = self.traced_edit("patch_embeddings", moved, in_place)
        assert_differs(got["image_features"], self.everything()["image_features"])

        def native(tensor: Tensor) -> Tensor:
            return self.as_native_patches(moved(self.served_patches(tensor)), tensor)

        place = {"patches": (self.bare.get_submodule(self.NATIVE["patch_embed"]), self.PATCH_SITE)}
        bare = self.bare_run(more=place, edits={"patches": native})
        assert_close(got["text_input"], bare["text_input"], ulps=ULPS_AFTER_MODEL)

    #: Where the patch embedding's output is, from the module NATIVE calls ``"patch_embed"``.
    PATCH_SITE = Site("")

    def served_patches(self, tensor: Tensor) -> Tensor:
        """What the bare patch embedding returns, as ``patch_embeddings`` serves it."""
        return tensor.flatten(2).transpose(1, 2) if tensor.dim() == 4 else self.shaped("", tensor)

    def as_native_patches(self, patches: Tensor, tensor: Tensor) -> Tensor:
        """The reverse of `served_patches`."""
        return patches.transpose(1, 2).reshape(tensor.shape) if tensor.dim() == 4 else patches.reshape(tensor.shape)
