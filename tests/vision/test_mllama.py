"""Mllama: blocks of the text model attend to the image, and no token of the prompt is replaced by it."""

import pytest
import torch

from nnterp.testing import VisionSuite
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import moved
from nnterp.testing.oracles import Site


class TestMllama(VisionSuite):
    """A row of the tower is an image with all its tiles."""

    FAMILY = "mllama_text_model"
    SPECIAL = ("<|image|>", "<|begin_of_text|>")
    IMAGE = "<|image|>"
    SCATTERED = False
    TEXT_LOAD_HAS_TOWER = False
    #: Behind the blocks that the projector reads beside the last: what enters the first is recorded by nobody.
    READ = -3
    CONFIG = {
        "model_type": "mllama",
        "image_token_index": 2,
        "vision_config": {
            "model_type": "mllama_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_global_layers": 2,
            "attention_heads": 4,
            "vision_output_dim": 96,
            "intermediate_layers_indices": [0, 1],
            "image_size": 16,
            "patch_size": 4,
            "max_num_tiles": 3,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [1, 3], [3, 1]],
        },
        "text_config": {
            "model_type": "mllama_text_model",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 128,
            "cross_attention_layers": [1],
            "bos_token_id": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    NATIVE = {
        "vision": "model.vision_model",
        "projector": "model.multi_modal_projector",
        "patch_embed": "model.vision_model.patch_embedding",
        "layers": "model.vision_model.transformer.layers",
        "text": "model.language_model",
    }
    BLOCK = {"mlp.act_fn": "mlp.activation_fn", "mlp.down_proj": "mlp.fc2"}

    def processor(self, tokenizer):
        from transformers import MllamaProcessor
        from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

        tokenizer.bos_token = "<|begin_of_text|>"
        images = MllamaImageProcessorPil(size={"height": 16, "width": 16}, max_image_tiles=3)
        return MllamaProcessor(images, tokenizer)

    def last_of_tower(self):
        """The last of the blocks whose contributions are gated."""
        return self.bare.get_submodule("model.vision_model.global_transformer.layers")[-1]

    def test_tower_output(self):
        bare = self.bare_run(more={"last": (self.last_of_tower(), Site(""))})
        assert_same(self.everything()["tower_output"], bare["last"])

    def test_gated_blocks(self):
        model = self.model
        blocks = self.bare.get_submodule("model.vision_model.global_transformer.layers")
        sites = {}
        for index, block in enumerate(blocks):
            sites["attention", index] = block.self_attn, Site("")
            sites["mlp", index] = block.mlp, Site("")
            sites["output", index] = block, Site("")
        bare = self.bare_run(more=sites)
        with torch.no_grad(), model.trace(self.prompt(), images=self.images()):
            read = [].save()
            for block in model.vision.global_layers:
                parts = (block.layer_input.clone(), block.self_attn.attention_output.clone())
                read.append((*parts, block.mlp.mlp_output.clone(), block.layer_output.clone()))
        for index, (entering, attention, mlp, leaving) in enumerate(read):
            block = blocks[index]
            assert_close(attention, block.gate_attn.tanh().detach() * bare["attention", index])
            assert_close(mlp, block.gate_ffn.tanh().detach() * bare["mlp", index])
            assert_same(leaving, bare["output", index])
            assert_close(entering + attention + mlp, leaving)

    @pytest.mark.parametrize("in_place", [False, True])
    def test_features_written(self, in_place):
        """They reach the tokens through the cross-attention blocks alone."""
        got = self.traced_edit("image_features", moved, in_place)
        projector = {"projector": (self.bare.get_submodule(self.NATIVE["projector"]), Site(""))}

        def native(tensor):
            return moved(tensor.flatten(0, -2)).reshape(tensor.shape)

        bare = self.bare_run(more=projector, edits={"projector": native})
        assert_close(got["logits"], bare.output.logits, ulps=ULPS_AFTER_MODEL)
        assert_differs(got["logits"], self.everything()["logits"])
        assert_same(got["text_input"], self.everything()["text_input"])
