"""Qwen2-VL, and Qwen2.5-VL, whose tower has windows."""

import pytest
import torch

from nnterp.testing.comparing import assert_differs, assert_same
from nnterp.testing.oracles import Site
from nnterp.testing.qwen_tower import TEXT, TOKENS, TOWER, QwenSuite


class TestQwen2VL(QwenSuite):
    FAMILY = "qwen2_vl_text"
    PROCESSOR = "Qwen2VLProcessor"
    CONFIG = {
        "model_type": "qwen2_vl",
        **TOKENS,
        "text_config": {"model_type": "qwen2_vl_text", **TEXT, "hidden_size": 48, "num_attention_heads": 6},
        "vision_config": {
            "model_type": "qwen2_vl_vision",
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 48,
            "mlp_ratio": 2,
            "num_heads": 4,
            "patch_size": 4,
        },
    }
    BLOCK = {**QwenSuite.BLOCK, "mlp.act_fn": "mlp.act", "mlp.down_proj": "mlp.fc2"}


class TestQwen25VL(QwenSuite):
    """Windows of two by two merge blocks, the last of an image incomplete; the block in the middle has none."""

    FAMILY = "qwen2_5_vl_text"
    PROCESSOR = "Qwen2_5_VLProcessor"
    CONFIG = {
        "model_type": "qwen2_5_vl",
        **TOKENS,
        "text_config": {"model_type": "qwen2_5_vl_text", **TEXT},
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            **TOWER,
            "fullatt_block_indexes": [1],
            "window_size": 16,
        },
    }
    NATIVE = {**QwenSuite.NATIVE, "patch_embed": "model.visual.blocks.0"}
    PATCH_SITE = Site("", "input")
    WINDOW, WINDOWED = 4, (0, 2)

    def test_patches_are_in_the_order_of_windows(self):
        """Not in that in which the processor gives them; what `patch_embeddings` is, is what the first block gets."""
        read = self.everything(2)
        assert_same(read["patch_embeddings"], read["layer_input", 0])
        with torch.no_grad():
            merged = self.bare.model.visual.patch_embed(self.inputs(2)["pixel_values"])
        assert_differs(read["patch_embeddings"][0], merged)
        assert [tuple(place) for place in self.places(2)[:24:4, 1:].tolist()] == [
            (0, 0),
            (0, 2),
            (2, 0),
            (2, 2),
            (0, 4),
            (0, 6),
        ]

    @pytest.mark.parametrize("layer", [0, 1])
    def test_a_change_stays_in_its_window(self, layer):
        """One patch changed: behind a block with windows its window alone is another, behind one without its image."""
        model, vision = self.model, self.model.vision
        place = self.places(2).tolist().index([0, 5, 8])
        with torch.no_grad(), model.trace(self.prompt(2), images=self.images(2)):
            vision.layers[layer].layer_input[0, place] += 1.0
            leaving = vision.layers[layer].layer_output.clone().save()
        off = (leaving - self.everything(2)["layer_output", layer]).abs().amax(-1)
        first, second = vision.patch_map(off, self.GRID)
        reached = torch.ones(6, 10, dtype=torch.bool)
        if layer == 0:
            reached[:4], reached[:, :8] = False, False
        assert torch.equal(first > 0, reached) and not second.any()

    def test_features_are_in_the_order_of_the_tokens(self):
        """The projector's output, window by window, is put back before it takes their place."""
        model = self.model
        with torch.no_grad(), model.trace(self.prompt(), images=self.images()):
            projected = model.projector.output.save()
            features = model.vision.image_features.save()
        blocks = self.places(1)[::4, 1:] // 2
        assert_same(features[blocks[:, 0] * 5 + blocks[:, 1]], projected)
        assert_differs(features, projected)
